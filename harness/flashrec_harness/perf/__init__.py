"""perf: noise-banded regression against stored baselines."""
