"""soak: minutes of mixed load in which nothing may be wrong, leak or grow."""

from flashrec_harness.soak.suite import SoakSettings, run

__all__ = ["SoakSettings", "run"]
