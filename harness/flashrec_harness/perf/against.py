"""``perf --against REV``: two commits, each in a work tree of its own, decided by interleaved pairs."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashrec.errors import ConfigError
from flashrec_harness import hardware, stats
from flashrec_harness.children import ChildError
from flashrec_harness.outcome import Band, Check, Outcome, Plot, Series, SuiteContext
from flashrec_harness.perf.judge import SUITE, broken_rules
from flashrec_harness.perf.measure import Measurement, ProcessResult, run_in_child
from flashrec_harness.perf.paired import Key, Pairs, Side, measure_pairs
from flashrec_harness.perf.rounds import GATED
from flashrec_harness.perf.worker import Task
from flashrec_harness.perf.workload import Workload
from flashrec_harness.worktrees import Repository, Revision, python_path

MeasureTree = Callable[[Path, Task, Path], ProcessResult]
"""Measures a task with the engine of a work tree, keeping its files under a path prefix."""

_OUTCOMES = {
    "slower": Outcome.FAIL,
    "faster": Outcome.PASS,
    "within noise": Outcome.PASS,
    "inconclusive": Outcome.INCONCLUSIVE,
}


_GRAVE: tuple[stats.Verdict, ...] = ("slower", "inconclusive")
"""Verdicts of one metric that the whole cell gets, gravest first."""


def measure_tree(tree: Path, task: Task, prefix: Path) -> ProcessResult:
    """A fresh process with a work tree's engine. Raises :class:`ChildError` if another engine was measured."""
    result = ProcessResult.of(run_in_child(task, prefix, env={"PYTHONPATH": python_path(tree)}))
    if not Path(result.engine).is_relative_to(tree):
        raise ChildError(f"{prefix.name} measured the engine in {result.engine}, not the one in {tree}")
    return result


def run(
    context: SuiteContext,
    workload: Workload,
    against: str,
    candidate: str | None = None,
    *,
    repository: Repository | None = None,
    measure: MeasureTree = measure_tree,
) -> list[Check]:
    """Decide ``candidate`` (default: the working tree as it stands) against the revision ``against``.

    Both engines run under this harness. Raises :class:`~flashrec.errors.ConfigError` for an unknown revision.
    """
    if context.url is not None:
        raise ConfigError("--against starts both commits itself; leave --url out")
    repository = repository or Repository.around()
    old = repository.resolve(against)
    new = repository.resolve(candidate) if candidate else repository.snapshot()
    workload = replace(workload, reference_requests=0, sweep=None)
    task = Task.of("engine", context, workload)
    foreign = hardware.foreign_processes()
    with ExitStack() as stack:
        trees = {
            "A": stack.enter_context(repository.checkout(old.sha)),
            "B": stack.enter_context(repository.checkout(new.sha)),
        }

        def side(name: Side, number: int) -> ProcessResult:
            return measure(trees[name], task, context.out_dir / f"{number:02d}-{name}")

        pairs = measure_pairs(side, workload)
    return judge(pairs, old, new, foreign)


def judge(pairs: Pairs, old: Revision, new: Revision, foreign: list[str]) -> list[Check]:
    """Is the measurement valid? If so, a verdict per cell, Holm's procedure running over all of them."""
    valid = _validity(pairs, old, new, foreign)
    name = f"against {old.label}"
    if valid.outcome is not Outcome.PASS:
        why = "the measurement is not valid"
        return [valid, *(Check(SUITE, f"{name} {c.name}", Outcome.NOT_RUN, "", why) for c in pairs.workload.cells)]
    intervals = {key: pairs.interval(key) for key in pairs.keys}
    p_values = {"\n".join(key): stats.paired_p_value(one) for key, one in intervals.items()}
    rejected = stats.holm(p_values, 1 - stats.CONFIDENCE)
    verdicts = {
        key: stats.paired_verdict(one, rejected=rejected["\n".join(key)], worse=1 if GATED[key[1]] > 0 else -1)
        for key, one in intervals.items()
    }
    cells = [_cell(pairs, cell.name, name, intervals, verdicts) for cell in pairs.workload.cells]
    return [valid, *([_cut_short(pairs)] if pairs.cut_short else []), *cells]


def _cut_short(pairs: Pairs) -> Check:
    """Fewer pairs see less, and say what; that they are fewer has nothing to do with what they show."""
    return Check(
        SUITE,
        "time budget",
        Outcome.INCONCLUSIVE,
        f"stopped after {len(pairs.b)} of {pairs.planned} ABBA pairs",
        reason="the time budget has no room for another pair: allow more (--budget)",
    )


def _validity(pairs: Pairs, old: Revision, new: Revision, foreign: list[str]) -> Check:
    broken = []
    for side, processes in ((old, pairs.a), (new, pairs.b)):
        broken += [f"{side.label}: {rule}" for rule in broken_rules(Measurement(processes), pairs.workload, [])]
    broken += [f"another process is on the device: {', '.join(foreign)}"] if foreign else []
    count = len(pairs.b)
    most = ", the most that are run" if pairs.planned == stats.MAX_PAIRS else ""
    ran = f"{count} of {pairs.planned} planned" if pairs.cut_short else f"{count}"
    return Check(
        SUITE,
        "paired measurement is valid",
        Outcome.INVALID if broken else Outcome.PASS,
        f"{ran} ABBA pairs of fresh processes of {old.label} and {new.label}{most}: the number follows from a "
        f"spread of {stats.percent(pairs.spread):.2f} % in the first {stats.MIN_PAIRS} (the noisiest: "
        f"{' '.join(pairs.widest)}); "
        f"{len(broken)} rule(s) broken",
        reason="; ".join(broken),
        data={"pairs": count, "pair_spread": pairs.spread, "old": old.sha, "new": new.sha},
        rows=[_resources(old, pairs.a), _resources(new, pairs.b)],
    )


def _resources(side: Revision, processes: list[ProcessResult]) -> dict[str, Any]:
    """Median times and largest memory of a side's processes; ``None`` for what none of them told."""
    told: dict[str, list[float]] = {}
    for name, value in (entry for process in processes for entry in process.resources().items()):
        told.setdefault(name, []).extend([] if value is None else [value])
    seconds = {name: statistics.median(values) for name, values in told.items() if name.endswith(" s")}
    return {"commit": side.label} | {
        name: seconds.get(name, max(values, default=None)) for name, values in told.items()
    }


def _cell(
    pairs: Pairs,
    cell: str,
    name: str,
    intervals: dict[Key, stats.PairedInterval],
    verdicts: dict[Key, stats.Verdict],
) -> Check:
    """The gravest verdict of the gated metrics is the cell's; where none is grave, its throughput's."""
    keys = [key for key in pairs.keys if key[0] == cell]
    graver = [key for grave in _GRAVE for key in keys if verdicts[key] == grave]
    main = graver[0] if graver else (cell, "throughput")
    one, verdict = intervals[main], verdicts[main]
    detectable = {
        key: stats.paired_detectable(intervals[key].pair_sd, len(pairs.b), comparisons=len(pairs.keys)) for key in keys
    }
    summary = (
        f"{main[1]} {_percents(one)} over {one.pairs} ABBA pairs; pair spread {stats.percent(one.pair_sd):.2f} %; "
        f"a change below {stats.percent(detectable[main]):.1f} % could be missed"
    )
    blindest = max(keys, key=lambda key: detectable[key])
    if detectable[blindest] > stats.TARGET_EFFECT:
        if blindest != main:
            summary += f" ({blindest[1]}: {stats.percent(detectable[blindest]):.1f} %)"
        summary += f", more than the {stats.TARGET_EFFECT:.0%} aimed at"
    if pairs.outputs_differ(cell):
        summary += "; the two commits return different results"
    return Check(
        SUITE,
        f"{name} {cell}",
        _OUTCOMES[verdict],
        summary,
        reason=_reason(verdict, one, main[1]),
        data={"cell": cell, "verdict": verdict},
        rows=[
            {
                "metric": key[1],
                "change %": round(stats.percent(intervals[key].mean), 2),
                "99 % from": round(stats.percent(intervals[key].low), 2),
                "to": round(stats.percent(intervals[key].high), 2),
                "detectable %": round(stats.percent(detectable[key]), 1),
                "verdict": verdicts[key],
            }
            for key in keys
        ],
        plots=[_plot(pairs, cell)],
    )


def _percents(one: stats.PairedInterval) -> str:
    low, high = stats.percent(one.low), stats.percent(one.high)
    return f"{stats.percent(one.mean):+.2f} % (99 % interval {low:+.2f} to {high:+.2f} %)"


def _reason(verdict: stats.Verdict, one: stats.PairedInterval, metric: str) -> str:
    if verdict == "slower":
        return f"slower: {metric} {stats.percent(one.mean):+.2f} %"
    if verdict == "faster":
        return ""
    if verdict == "within noise":
        return (
            f"within noise: no slowdown of {stats.TARGET_EFFECT:.0%}, and no gain. Revert a change that was made for "
            "speed and keep the code simple"
        )
    return (
        f"inconclusive: {metric} {_percents(one)}: a slowdown of {stats.TARGET_EFFECT:.0%} is not excluded, and none "
        "is shown; use a quieter machine or a longer workload"
    )


def _plot(pairs: Pairs, cell: str) -> Plot:
    old, new = (pairs.values(side, (cell, "throughput")) for side in ("A", "B"))
    changes = [stats.percent(stats.log_ratio(b, a)) for a, b in zip(old, new, strict=True)]
    floor = stats.percent(stats.FLOOR)
    return Plot(
        title=f"new against old, pair by pair, {cell}",
        x_label="pair",
        y_label="throughput change %",
        series=[Series("pairs", list(range(1, len(changes) + 1)), changes)],
        bands=[Band(-floor, floor, "smallest change worth a verdict")],
    )
