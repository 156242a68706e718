"""The determinism suite: the same bits at temperature 0, in N >= 120 waves across processes (SPEC R1)."""
