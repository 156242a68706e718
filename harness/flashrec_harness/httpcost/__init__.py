"""http-cost: what HTTP takes of the throughput that the engine has in process, and what it adds to the tail."""

from flashrec_harness.httpcost.suite import HttpCostSettings, run

__all__ = ["HttpCostSettings", "run"]
