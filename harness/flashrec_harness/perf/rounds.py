"""Timed rounds of one cell in one process, and the figures that come out of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from flashrec_harness import load
from flashrec_harness.load import LoadResult

Round = Callable[[], LoadResult]

GATED = {"throughput": -1, "p50_ms": 1, "p99_ms": 1}
"""The few metrics that verdicts are about, with the sign that is worse."""
UNITS = {"throughput": "req/s", "p50_ms": "ms", "p99_ms": "ms", "goodput": "req/s", "ratio": "x", "sglang_ratio": "x"}


@dataclass(slots=True)
class CellRounds:
    """What one process measured at one cell; latencies in milliseconds, one list per round.

    ``failures`` are the error texts of requests that were not answered. ``outputs`` is a digest of the
    results: every process must return the same.
    """

    throughput: list[float] = field(default_factory=list)
    latencies_ms: list[list[float]] = field(default_factory=list)
    goodput: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    hit_rate: float | None = None
    outputs: str = ""

    def metrics(self) -> dict[str, float]:
        """Process medians: throughput over rounds, latency percentiles over all timed requests."""
        pooled = [latency for one in self.latencies_ms for latency in one]
        figures = {
            "throughput": statistics.median(self.throughput),
            "p50_ms": load.percentile(pooled, 50),
            "p99_ms": load.percentile(pooled, 99),
        }
        return figures | ({"goodput": statistics.median(self.goodput)} if self.goodput else {})

    def per_round(self) -> dict[str, list[float]]:
        """The same metrics for each round alone: the faint points of the plots."""
        return {
            "throughput": self.throughput,
            "p50_ms": [load.percentile(one, 50) for one in self.latencies_ms],
            "p99_ms": [load.percentile(one, 99) for one in self.latencies_ms],
        }

    def as_json(self) -> dict[str, Any]:
        """Plain data; :class:`CellRounds` takes it back as keywords."""
        return asdict(self)


def time_rounds(
    one_round: Round,
    *,
    rounds: int,
    warmup_rounds: int,
    before_round: Callable[[], None] = lambda: None,
    target_ms: float | None = None,
) -> CellRounds:
    """Run ``warmup_rounds`` untimed and ``rounds`` timed ones; ``before_round`` is never timed.

    A round with a failed request still counts, and its failures are kept: the run is then invalid.
    """
    found = CellRounds()
    for number in range(warmup_rounds + rounds):
        before_round()
        result = one_round()
        found.failures += [answer.error for answer in result.failures]
        if number < warmup_rounds or not result.latencies_ms:
            continue
        found.throughput.append(result.throughput)
        found.latencies_ms.append(result.latencies_ms)
        if target_ms is not None:
            found.goodput.append(result.goodput(target_ms))
    return found
