"""perf: noise-banded regression against stored baselines."""

from flashrec_harness.perf.suite import run

__all__ = ["run"]
