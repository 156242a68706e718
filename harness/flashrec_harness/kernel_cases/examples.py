"""Cases that are judged every time, whatever is drawn: one for every bug that a kernel had."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from flashrec_harness.kernel_cases.base import Draws, KernelCase, Lane
from flashrec_harness.kernel_cases.pointwise import quant_case
from flashrec_harness.kernel_cases.products import fp8_product

_SEED = 9


def _data(lane: Lane) -> Draws:
    return Draws(lane, torch.Generator().manual_seed(_SEED))


def _linear_fp8(lane: Lane) -> list[KernelCase]:
    # Sizes that are no multiples of 16, which ``_scaled_mm`` refuses.
    odd = fp8_product(_data(lane), 16, 100, 1000)
    if not lane.compiled:
        return [odd]
    # cuBLASLt found no kernel for 7 rows, nor for operands that do not begin at a multiple of 16 bytes.
    return [fp8_product(_data(lane), 7, 2048, 2048, offset=offset) for offset in (0, 1)] + [odd]


def _quant_per_token(lane: Lane) -> list[KernelCase]:
    # Scales were multiplied by a rounded reciprocal instead of divided: one row in a few shows it.
    return [quant_case(_data(lane).normal(257, 64), lane)]


EXAMPLES: Mapping[str, Callable[[Lane], list[KernelCase]]] = {
    "linear_fp8": _linear_fp8,
    "quant_per_token": _quant_per_token,
}
"""By kernel name. A bug that is found gets its line here."""
