"""From samples to verdicts: is the measurement valid, what are its figures, are they worse than stored?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flashrec_harness import stats
from flashrec_harness.baselines import Baseline, MeasuredSession
from flashrec_harness.outcome import Band, Check, Outcome, Plot, Series, worst
from flashrec_harness.perf.measure import Measurement
from flashrec_harness.perf.rounds import GATED, UNITS
from flashrec_harness.perf.workload import Cell, Workload

SUITE = "perf"


def broken_rules(measurement: Measurement, workload: Workload, foreign: Sequence[str]) -> list[str]:
    """The measurement's own rules that it broke: all answered, same results, never profiled, alone."""
    broken: list[str] = []
    for cell in workload.cells:
        runs = [process.cells[cell.name] for process in measurement.engine]
        failed = [error for run in runs for error in run.failures]
        if failed:
            broken.append(f"{cell.name}: {len(failed)} requests failed, first: {failed[0][:120]}")
        if len({run.outputs for run in runs}) > 1:
            broken.append(f"{cell.name}: processes returned different results, so they did different work")
        if any(len(run.throughput) < workload.rounds for run in runs):
            broken.append(f"{cell.name}: fewer timed rounds than {workload.rounds}")
    profiled = [process.pid for process in measurement.engine if process.profiled]
    if profiled:
        broken.append(f"process {profiled[0]} has been profiled; its times are not performance")
    if foreign:
        broken.append(f"another process is on the device: {', '.join(foreign)}")
    return broken


def validity(
    measurement: Measurement, workload: Workload, foreign: Sequence[str], *, one_server: bool = False
) -> Check:
    """Whether the measurement kept its rules. ``one_server``: the processes are clients of a running server."""
    broken = broken_rules(measurement, workload, foreign)
    requests = sum(len(ms) for p in measurement.engine for c in p.cells.values() for ms in c.latencies_ms)
    summary = (
        f"{len(measurement.engine)} processes x {workload.rounds} rounds, {requests} timed requests, all "
        "answered with the same results in every process; no profiler, no foreign process seen"
    )
    if one_server:
        summary += "; all from one server process, so noise between server processes is not seen"
    return Check(
        SUITE,
        "measurement is valid",
        Outcome.INVALID if broken else Outcome.PASS,
        f"{len(broken)} rule(s) broken: {'; '.join(broken)}" if broken else summary,
        reason=broken[0] if broken else "",
        data={"requests": requests, "retries": measurement.retries, "broken": broken},
    )


def _noise_percent(values: Sequence[float]) -> float:
    return stats.percent(stats.spread([list(values)]).within_session)


def figures(cell: Cell, measurement: Measurement, session: MeasuredSession) -> Check:
    """One cell's figures with their noise, the ratio to the yardstick, and published figures beside them."""
    samples = session.samples[cell.name]
    rows = [
        {
            "metric": metric,
            "unit": UNITS[metric],
            "median of processes": statistics.median(values),
            "lowest": min(values),
            "highest": max(values),
            "process noise %": round(_noise_percent(values), 2),
        }
        for metric, values in samples.items()
    ]
    throughput = statistics.median(samples["throughput"])
    rows += [
        {
            "metric": f"anchor: {name}",
            "unit": "req/s",
            "median of processes": figure,
            "lowest": None,
            "highest": None,
            "process noise %": f"measured/{name} {throughput / figure:.2f}",
        }
        for name, figure in cell.anchor.items()
    ]
    runs = [process.cells[cell.name] for process in measurement.engine]
    hits = [run.hit_rate for run in runs if run.hit_rate is not None]
    parts = [
        f"{throughput:.4g} req/s, p50 {statistics.median(samples['p50_ms']):.4g} ms, "
        f"p99 {statistics.median(samples['p99_ms']):.4g} ms",
        f"noise between processes {_noise_percent(samples['throughput']):.1f} %",
    ]
    parts += [
        f"{statistics.median(samples[metric]):.3g}x {name} in the same run"
        for name, metric in (("transformers", "ratio"), ("SGLang", "sglang_ratio"))
        if metric in samples
    ]
    if hits:
        parts.append(f"prefix cache hit rate {statistics.mean(hits):.0%}")
    return Check(
        SUITE,
        f"figures {cell.name}",
        Outcome.PASS,
        "; ".join(parts),
        data={"cell": cell.name, "samples": samples, "hit_rate": statistics.mean(hits) if hits else None},
        rows=rows,
        plots=[_rounds_plot(cell.name, session)],
    )


def _rounds_plot(cell: str, session: MeasuredSession) -> Plot:
    medians = session.samples[cell]["throughput"]
    rounds = session.rounds[cell]["throughput"]
    scatter = [
        (number + 0.12 * (index / max(len(values) - 1, 1) - 0.5) * 2, value)
        for number, values in enumerate(rounds)
        for index, value in enumerate(values)
    ]
    return Plot(
        title=f"throughput, {cell}",
        x_label="process",
        y_label="requests/s",
        series=[
            Series("rounds", [x for x, _ in scatter], [y for _, y in scatter], faint=True),
            Series("process medians", list(range(len(medians))), medians),
        ],
        x_ticks=[str(number + 1) for number in range(len(medians))],
    )


def resources(measurement: Measurement) -> Check:
    """Start-up time and memory, capture time and graph memory: metrics too."""
    rows = [{"process": number, **process.resources()} for number, process in enumerate(measurement.engine, start=1)]
    startup = statistics.median(process.startup_s for process in measurement.engine)
    memory = max(process.peak_rss_mib for process in measurement.engine)
    return Check(
        SUITE,
        "start-up and memory",
        Outcome.PASS,
        f"ready in {startup:.1f} s (median), at most {memory:.0f} MiB of host memory{_graphs(measurement)}",
        rows=rows,
        data={"configuration": measurement.engine[0].configuration},
    )


def _graphs(measurement: Measurement) -> str:
    """What the captured graphs cost, where there are any."""
    costs = [cost for process in measurement.engine if (cost := process.graph_cost())]
    if not costs:
        return ""
    seconds = statistics.median(cost["graph capture s"] for cost in costs)
    return f"; graphs captured in {seconds:.1f} s (median), {max(cost['graph memory MiB'] for cost in costs):.0f} MiB"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One gated metric of one cell against its baseline; ``worse`` is the log-ratio towards the bad side."""

    cell: str
    metric: str
    base: float
    new: float
    worse: float
    band: float

    @property
    def key(self) -> str:
        return f"{self.cell} {self.metric}"


def comparisons(session: MeasuredSession, baseline: Baseline) -> list[Comparison]:
    """Every gated metric of every cell; the session's value is the geometric mean of its process medians."""
    found = []
    for cell, metrics in session.samples.items():
        for metric, sign in GATED.items():
            spread = baseline.spread(cell, metric)
            new = stats.geometric_mean(metrics[metric])
            change = sign * stats.log_ratio(new, spread.centre)
            band = stats.band(spread, len(metrics[metric]))
            found.append(Comparison(cell, metric, spread.centre, new, change, band))
    return found


def _judge_one(one: Comparison, rejected: bool) -> tuple[Outcome, str]:
    if one.worse > one.band and rejected:
        return Outcome.FAIL, "slower"
    if one.worse > one.band:
        return Outcome.INCONCLUSIVE, "outside the band, not significant"
    if one.worse < -one.band:
        return Outcome.PASS, "faster"
    return Outcome.PASS, "within noise"


def against_baseline(session: MeasuredSession, baseline: Baseline, soft_differences: Sequence[str]) -> list[Check]:
    """Screen a session against its baseline, one check per cell.

    A metric fails when it is worse by more than its noise band and Holm's procedure over all metrics of
    all cells rejects it at 3 %. Worse than the band alone does not decide, nor does any screening across a
    soft difference (driver, torch, triton): paired rounds do (``--against``).
    """
    every = comparisons(session, baseline)
    sessions = len(baseline.sessions)
    rejected = stats.holm({one.key: stats.screen_p_value(one.worse, one.band, sessions) for one in every})
    checks = []
    for cell in session.samples:
        mine = [one for one in every if one.cell == cell]
        judged = [(one, *_judge_one(one, rejected[one.key])) for one in mine]
        outcome = worst(found for _, found, _ in judged)
        if outcome is Outcome.FAIL and soft_differences:
            outcome = Outcome.INCONCLUSIVE
        checks.append(_comparison_check(cell, judged, outcome, baseline, session, soft_differences, len(every)))
    return checks


def _detectable_percent(one: Comparison, baseline: Baseline, metrics: int) -> float:
    return stats.percent(stats.screen_detectable(one.band, len(baseline.sessions), metrics=metrics))


def _of_boots(baseline: Baseline) -> str:
    """Sessions of one boot cannot tell by how much machines of one kind differ, which a band should hold."""
    return " of one boot" if baseline.boots == 1 else f" of {baseline.boots} boots"


def _comparison_check(
    cell: str,
    judged: Sequence[tuple[Comparison, Outcome, str]],
    outcome: Outcome,
    baseline: Baseline,
    session: MeasuredSession,
    soft_differences: Sequence[str],
    metrics: int,
) -> Check:
    rows: list[dict[str, Any]] = [
        {
            "metric": one.metric,
            "baseline": one.base,
            "now": one.new,
            "change %": round(stats.percent(one.worse * GATED[one.metric]), 2),
            "band ± %": round(stats.percent(one.band), 2),
            "detectable %": round(_detectable_percent(one, baseline, metrics), 1),
            "verdict": words,
        }
        for one, _, words in judged
    ]
    grave, _, words = max(judged, key=lambda entry: entry[0].worse / entry[0].band)
    change = stats.percent(grave.worse * GATED[grave.metric])
    summary = (
        f"{len(judged)} metrics against {len(baseline.sessions)} stored sessions{_of_boots(baseline)}; the furthest is "
        f"{grave.metric} {change:+.1f} % ({words}, band ± {stats.percent(grave.band):.1f} %); smaller than "
        f"{_detectable_percent(grave, baseline, metrics):.1f} % could be missed"
    )
    reason = ""
    if outcome is not Outcome.PASS:
        reason = f"{grave.metric}: {change:+.1f} % against the baseline, {words}"
    if soft_differences and outcome is not Outcome.PASS:
        reason += f"; screening only, soft keys differ: {', '.join(soft_differences)}"
    if outcome is Outcome.INCONCLUSIVE:
        reason += "; decide with paired rounds: perf --against REV"
    return Check(
        SUITE,
        f"against baseline {cell}",
        outcome,
        summary,
        reason=reason,
        data={"cell": cell, "soft_differences": list(soft_differences)},
        rows=rows,
        plots=[_baseline_plot(cell, session, baseline)],
    )


def _baseline_plot(cell: str, session: MeasuredSession, baseline: Baseline) -> Plot:
    spread = baseline.spread(cell, "throughput")
    now = session.samples[cell]["throughput"]
    band = stats.band(spread, len(now))
    stored = [(i, v) for i, old in enumerate(baseline.sessions) for v in old.samples[cell]["throughput"]]
    position = len(baseline.sessions)
    rounds = [v for process in session.rounds[cell]["throughput"] for v in process]
    return Plot(
        title=f"throughput against the baseline, {cell}",
        x_label="session",
        y_label="requests/s",
        series=[
            Series("rounds", [position] * len(rounds), rounds, faint=True),
            Series("stored process medians", [float(i) for i, _ in stored], [v for _, v in stored]),
            Series("this run's process medians", [float(position)] * len(now), now),
        ],
        bands=[Band(spread.centre * math.exp(-band), spread.centre * math.exp(band), "noise band")],
        x_ticks=[old.run_id[:8] for old in baseline.sessions] + ["this run"],
    )
