"""overload: what a server does at a multiple of its capacity."""

from flashrec_harness.overload.suite import OverloadSettings, run

__all__ = ["OverloadSettings", "run"]
