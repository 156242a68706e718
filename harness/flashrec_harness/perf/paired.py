"""Pairs of fresh processes of two commits, interleaved ABBA, as many as their spread asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from flashrec_harness import stats
from flashrec_harness.perf.measure import ProcessResult
from flashrec_harness.perf.rounds import GATED
from flashrec_harness.perf.workload import Workload

Side = Literal["A", "B"]
RunSide = Callable[[Side, int], ProcessResult]
"""Measures one fresh process of the old (A) or the new (B) commit; the number is the process's own."""

Key = tuple[str, str]
"""Cell and gated metric."""


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


def measure_pairs(run: RunSide, workload: Workload, *, effect: float = stats.TARGET_EFFECT) -> Pairs:
    """Five pairs, then as many more as the spread of the noisiest gated metric asks for, at most twenty.

    Only the spread decides how many: looking at the means and stopping when they please would inflate
    false alarms.
    """
    pairs = Pairs(workload)
    while len(pairs.b) < pairs.planned:
        done = len(pairs.b)
        for place, side in enumerate(stats.abba_order(done + 1)[-2:]):
            if side == "A":
                pairs.a.append(run("A", 2 * done + place))
            else:
                pairs.b.append(run("B", 2 * done + place))
        if len(pairs.b) == stats.MIN_PAIRS:
            _plan(pairs, effect)
    return pairs


def _plan(pairs: Pairs, effect: float) -> None:
    pairs.spread, pairs.widest = max((pairs.interval(key).pair_sd, key) for key in pairs.keys)
    bound = stats.spread_bound(pairs.spread, stats.MIN_PAIRS)
    pairs.planned = stats.pairs_needed(bound, effect, comparisons=len(pairs.keys)) or stats.MAX_PAIRS
