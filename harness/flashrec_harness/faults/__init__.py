"""Faults planted on purpose, to show that a suite catches them (SPEC H4).

This package can be imported only where ``FLASHREC_PLANT_FAULTS`` is set: in a suite's own tests, in a run that was
started with ``--plant NAME``, and in ``flashrec-harness faults``, which judges nothing itself. Each fault patches
the engine or the harness of one process for as long as a context lasts.
"""

from __future__ import annotations

import os

from flashrec_harness.planting import PLANT_VARIABLE

if PLANT_VARIABLE not in os.environ:
    raise ImportError(f"flashrec_harness.faults is for planted runs: name a fault in {PLANT_VARIABLE} (--plant NAME)")

from flashrec_harness.faults import answers, cache, device, kernels, measuring, scheduling, search, serving
from flashrec_harness.faults.registry import FAULTS, Catch, Fault, plant

__all__ = [
    "FAULTS",
    "Catch",
    "Fault",
    "answers",
    "cache",
    "device",
    "kernels",
    "measuring",
    "plant",
    "scheduling",
    "search",
    "serving",
]
