"""The determinism suite: the same bits at temperature 0, in N >= 120 waves across processes (SPEC R1)."""

from __future__ import annotations

from flashrec_harness.determinism.suite import run

__all__ = ["run"]
