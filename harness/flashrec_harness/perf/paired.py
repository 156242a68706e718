"""Deciding between two commits: interleaved pairs of fresh processes, ABBA, on one machine in one session."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from flashrec.errors import ConfigError
from flashrec_harness import stats
from flashrec_harness.children import harness_root
from flashrec_harness.outcome import Band, Check, Outcome, Plot, Series, SuiteContext
from flashrec_harness.perf.measure import ProcessResult, RunTask, run_in_child
from flashrec_harness.perf.rounds import GATED
from flashrec_harness.perf.worker import Task
from flashrec_harness.perf.workload import Workload

TARGET_EFFECT = 0.03
"""The slowdown (log-ratio) that the number of pairs is chosen to detect."""

Side = Literal["A", "B"]
RunSide = Callable[[Side, int], ProcessResult]
"""Measures one fresh process of the old (A) or the new (B) commit; the number is the process's own."""


@contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """A work tree of ``revision`` for as long as the context lasts. Raises :class:`ConfigError`."""
    with tempfile.TemporaryDirectory(prefix="flashrec-against-") as directory:
        tree = Path(directory) / "tree"
        added = subprocess.run(
            ["git", "worktree", "add", "--detach", str(tree), revision], capture_output=True, text=True, check=False
        )
        if added.returncode != 0:
            raise ConfigError(f"--against {revision}: {' '.join(added.stderr.split())[-200:]}")
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], capture_output=True, check=False)


@dataclass(slots=True)
class Pairs:
    """Values per cell and metric, one entry per pair, of the old (``a``) and the new (``b``) commit."""

    a: dict[tuple[str, str], list[float]]
    b: dict[tuple[str, str], list[float]]
    outputs_differ: set[str]

    def interval(self, cell: str, metric: str) -> stats.PairedInterval:
        """Confidence interval of the log-ratio new to old."""
        return stats.paired_interval(self.a[cell, metric], self.b[cell, metric])

    @property
    def count(self) -> int:
        """Complete pairs so far."""
        return min(map(len, self.b.values()), default=0)


def measure_pairs(run: RunSide, workload: Workload, *, effect: float = TARGET_EFFECT) -> Pairs:
    """Five pairs, then as many more as the spread seen so far asks for, at most twenty.

    Only the spread decides how many: looking at the means and stopping when they please would inflate
    false alarms.
    """
    pairs = Pairs({}, {}, set())
    wanted = stats.MIN_PAIRS
    done = 0
    while done < wanted:
        order: list[Side] = ["A", "B"] if done % 2 == 0 else ["B", "A"]
        results = {side: run(side, 2 * done + place) for place, side in enumerate(order)}
        for cell in workload.cells:
            before, after = (results[side].cells[cell.name] for side in ("A", "B"))
            if before.outputs != after.outputs:
                pairs.outputs_differ.add(cell.name)
            for metric in GATED:
                pairs.a.setdefault((cell.name, metric), []).append(before.metrics()[metric])
                pairs.b.setdefault((cell.name, metric), []).append(after.metrics()[metric])
        done += 1
        if done == stats.MIN_PAIRS:
            spread = max(pairs.interval(cell.name, "throughput").pair_sd for cell in workload.cells)
            wanted = stats.pairs_needed(spread, effect) or stats.MAX_PAIRS
    return pairs


_OUTCOMES = {
    "slower": Outcome.FAIL,
    "faster": Outcome.PASS,
    "within noise": Outcome.PASS,
    "inconclusive": Outcome.INCONCLUSIVE,
}
_ADVICE = {
    "slower": "",
    "faster": "",
    "within noise": "; a change meant to be faster is not: revert it and keep the code simple",
    "inconclusive": "; the interval is wider than the floor: quieter machine or a longer workload",
}


def judge(pairs: Pairs, cell: str, revision: str) -> Check:
    """One cell's verdict on throughput, with latencies beside it."""
    found = {metric: pairs.interval(cell, metric) for metric in GATED}
    verdicts = {
        metric: stats.paired_verdict(interval, worse=1 if GATED[metric] > 0 else -1)
        for metric, interval in found.items()
    }
    main = found["throughput"]
    verdict = verdicts["throughput"]
    detectable = stats.paired_detectable(main.pair_sd, main.pairs)
    summary = (
        f"throughput {stats.percent(main.mean):+.2f} % (99 % interval {stats.percent(main.low):+.2f} to "
        f"{stats.percent(main.high):+.2f} %) over {main.pairs} ABBA pairs; pair spread "
        f"{stats.percent(main.pair_sd):.1f} %, detectable {stats.percent(detectable):.1f} %"
    )
    if detectable > TARGET_EFFECT:
        summary += f", above the {TARGET_EFFECT:.0%} aimed at"
    if cell in pairs.outputs_differ:
        summary += "; the two commits return different results"
    outcome = _OUTCOMES[verdict]
    return Check(
        "perf",
        f"against {revision} {cell}",
        outcome,
        summary,
        reason="" if outcome is Outcome.PASS and verdict == "faster" else f"{verdict}{_ADVICE[verdict]}",
        rows=[
            {
                "metric": metric,
                "change %": round(stats.percent(interval.mean), 2),
                "from %": round(stats.percent(interval.low), 2),
                "to %": round(stats.percent(interval.high), 2),
                "verdict": verdicts[metric],
            }
            for metric, interval in found.items()
        ],
        plots=[_plot(pairs, cell)],
    )


def _plot(pairs: Pairs, cell: str) -> Plot:
    old, new = pairs.a[cell, "throughput"], pairs.b[cell, "throughput"]
    changes = [stats.percent(stats.log_ratio(b, a)) for a, b in zip(old, new, strict=True)]
    floor = stats.percent(stats.FLOOR)
    return Plot(
        title=f"new against old, pair by pair, {cell}",
        x_label="pair",
        y_label="throughput change %",
        series=[Series("pairs", list(range(1, len(changes) + 1)), changes)],
        bands=[Band(-floor, floor, "floor")],
    )


def run_paired(context: SuiteContext, workload: Workload, revision: str) -> list[Check]:
    """Measure this tree against ``revision``, both under this tree's harness."""
    task = Task.of("engine", context, workload)
    with checkout(revision) as tree:
        old_engine = os.pathsep.join([str(tree / "engine"), str(harness_root())])
        sides: dict[Side, RunTask] = {
            "A": partial(run_in_child, env={"PYTHONPATH": old_engine}),
            "B": run_in_child,
        }

        def run(side: Side, number: int) -> ProcessResult:
            return ProcessResult.of(sides[side](task, context.out_dir / f"{number:02d}-{side}"))

        pairs = measure_pairs(run, replace(workload, reference_requests=0))
    return [judge(pairs, cell.name, revision) for cell in workload.cells]
