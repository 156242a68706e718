"""Pairs of fresh processes of two commits, interleaved ABBA, as many as their spread asks for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from flashrec_harness import budget, stats
from flashrec_harness.perf.measure import ProcessResult, progress
from flashrec_harness.perf.rounds import GATED
from flashrec_harness.perf.workload import Workload

Side = Literal["A", "B"]
RunSide = Callable[[Side, int], ProcessResult]
"""Measures one fresh process of the old (A) or the new (B) commit; the number is the process's own."""

Key = tuple[str, str]
"""Cell and gated metric."""

_ROOM = 1.25
"""A pair is begun where a time budget has room for so many times the longest one before."""


@dataclass(slots=True)
class Pairs:
    """Every process of both sides, in pairs: ``a[i]`` ran next to ``b[i]``.

    ``planned`` pairs are enough for the spread seen in the first five, or the most that are ever run;
    ``spread`` is the standard deviation of the log-ratio that this was planned with: the largest of any gated metric,
    of ``widest``.
    """

    workload: Workload
    a: list[ProcessResult] = field(default_factory=list)
    b: list[ProcessResult] = field(default_factory=list)
    planned: int = field(default_factory=lambda: stats.MIN_PAIRS)
    spread: float = 0.0
    widest: Key = ("", "")

    @property
    def cut_short(self) -> bool:
        """Whether a time budget left no room for all of the planned pairs."""
        return len(self.b) < self.planned

    @property
    def keys(self) -> list[Key]:
        """Every gated metric of every cell: the family of hypotheses that Holm's procedure corrects for."""
        return [(cell.name, metric) for cell in self.workload.cells for metric in GATED]

    def values(self, side: Side, key: Key) -> list[float]:
        """Process medians of one metric, one per pair."""
        cell, metric = key
        return [process.cells[cell].metrics()[metric] for process in (self.a if side == "A" else self.b)]

    def interval(self, key: Key) -> stats.PairedInterval:
        """Confidence interval of the log-ratio new to old."""
        return stats.paired_interval(self.values("A", key), self.values("B", key))

    def outputs_differ(self, cell: str) -> bool:
        """Whether the two commits answered the cell's requests differently."""
        return {process.cells[cell].outputs for process in self.a} != {
            process.cells[cell].outputs for process in self.b
        }


def measure_pairs(
    run: RunSide,
    workload: Workload,
    *,
    effect: float = stats.TARGET_EFFECT,
    seconds_left: Callable[[], float | None] = budget.seconds_left,
    clock: Callable[[], float] = time.monotonic,
    tell: Callable[[str], None] = progress,
) -> Pairs:
    """Five pairs, then as many more as the spread of the noisiest gated metric asks for, at most twenty.

    Only the spread and the time budget decide how many: looking at the means and stopping when they please would
    inflate false alarms.
    """
    pairs = Pairs(workload)
    longest = 0.0
    while len(pairs.b) < pairs.planned:
        done, started, left = len(pairs.b), clock(), seconds_left()
        if done >= stats.MIN_PAIRS and left is not None and left < _ROOM * longest:
            break
        for place, side in enumerate(stats.abba_order(done + 1)[-2:]):
            if side == "A":
                pairs.a.append(run("A", 2 * done + place))
            else:
                pairs.b.append(run("B", 2 * done + place))
        longest = max(longest, clock() - started)
        if len(pairs.b) == stats.MIN_PAIRS:
            _plan(pairs, effect)
            tell(
                f"pair spread {stats.percent(pairs.spread):.2f} % ({pairs.widest[1]} of {pairs.widest[0]}): "
                f"{pairs.planned} pairs, up to {(pairs.planned - done - 1) * longest / 60:.1f} min more"
            )
    return pairs


def _plan(pairs: Pairs, effect: float) -> None:
    pairs.spread, pairs.widest = max((pairs.interval(key).pair_sd, key) for key in pairs.keys)
    bound = stats.spread_bound(pairs.spread, stats.MIN_PAIRS)
    pairs.planned = stats.pairs_needed(bound, effect, comparisons=len(pairs.keys)) or stats.MAX_PAIRS
