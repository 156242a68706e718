"""The tail of a lone client's latencies, by its quantiles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from flashrec_harness.httpcost.cells import TAIL_REQUESTS, WAKING
from flashrec_harness.httpcost.figures import SUITE, with_figures
from flashrec_harness.httpcost.measure import Half, Measured
from flashrec_harness.load import percentile
from flashrec_harness.outcome import Check, Outcome, Plot, Series

TAIL = 1.1
"""Highest p99 over p50 at concurrency 1."""
_CHUNKS = 100
_PERCENTILES = [step / 2 for step in range(201)]


def tail(found: Measured) -> Check:
    """p99 over p50 of the answers over HTTP, all rounds together; ``found`` is measured at concurrency 1.

    A machine that changes between the rounds leaves each of them steadier than all together, so what they have by
    themselves is shown as well. A round's first answers wake what slept while the other side had its round. They count;
    what the ratio is without them is shown beside, and what it is of a computation that does not change: see
    :mod:`.gauge`.
    """
    name = f"p99 over p50 at concurrency 1: {found.point.row}"
    times = _times(found.http)
    if not times:
        return Check(SUITE, name, Outcome.INVALID, "", reason="no request was answered")
    inside = _times(found.inside)
    gauge = [ms for half in found.http for ms in half.gauge_ms]
    outcome, reason = _verdict(times, inside, gauge)
    figures = f"{_ratio(times):.3f} (wanted at most {TAIL:g}): p50 {percentile(times, 50):.3g} ms, "
    figures += f"p99 {percentile(times, 99):.3g} ms of {len(times)} answers"
    figures += f"; in process {_ratio(inside):.3f}, p50 {percentile(inside, 50):.3g} ms; without the first {WAKING} of "
    figures += f"each round {_awake(found.http)}, in process {_awake(found.inside)}"
    rounds = [half.latencies_ms for half in found.http if half.latencies_ms]
    if len(rounds) > 1:
        figures += f"; its rounds {_range(map(_ratio, rounds), '.3f')}, p50 {_range(map(_median, rounds), '.3g')} ms"
    if gauge:
        figures += f"; a computation beside it {_ratio(gauge):.3f}, p50 {percentile(gauge, 50):.3g} ms"
    plots = [_latencies(times, inside), _through(times)]
    check = with_figures(Check(SUITE, name, outcome, figures, reason=reason, plots=plots), found)
    check.data["waking ms"] = [half.latencies_ms[:WAKING] for half in found.http]
    check.data["waking ms in process"] = [half.latencies_ms[:WAKING] for half in found.inside]
    check.data["p50 ms of each round"] = [round(_median(times), 4) for times in rounds]
    check.data["p99 over p50 of each round"] = [round(_ratio(times), 4) for times in rounds]
    check.data["gauge ms"] = [round(ms, 4) for ms in gauge]
    return check


def _verdict(times: Sequence[float], inside: Sequence[float], gauge: Sequence[float]) -> tuple[Outcome, str]:
    if len(times) < TAIL_REQUESTS:
        missing = TAIL_REQUESTS - len(times)
        return Outcome.INCONCLUSIVE, f"{missing} more answers are needed: longer --seconds, or more --rounds"
    if _ratio(times) <= TAIL:
        return Outcome.PASS, ""
    reason = f"p99 is {_ratio(times):.3f} of p50, more than {TAIL:g}"
    if _ratio(inside) > TAIL:
        reason += "; in process it is, too: engine or machine"
    if gauge and _ratio(gauge) > TAIL:
        reason += f"; a computation beside it varied by {_ratio(gauge):.3f}: the machine, or too few cores, may be why"
    return Outcome.FAIL, reason


def _times(side: Sequence[Half]) -> list[float]:
    return [ms for half in side for ms in half.latencies_ms]


def _ratio(times: Sequence[float]) -> float:
    return percentile(times, 99) / percentile(times, 50)


def _median(times: Sequence[float]) -> float:
    return percentile(times, 50)


def _range(values: Iterable[float], digits: str) -> str:
    every = sorted(values)
    return f"{every[0]:{digits}} to {every[-1]:{digits}}"


def _awake(side: Sequence[Half]) -> str:
    """p99 over p50 without the first answers of each round."""
    times = [ms for half in side for ms in half.latencies_ms[WAKING:]]
    return f"{_ratio(times):.3f}" if times else "unknown"


def _through(times: Sequence[float]) -> Plot:
    """Whether slow answers come now and then, or while something else is going on."""
    chunks = [chunk for chunk in np.array_split(np.asarray(times), _CHUNKS) if len(chunk)]
    places = [sum(map(len, chunks[:number])) for number in range(len(chunks))]
    return Plot(
        title="latency over HTTP, round after round",
        x_label="answer",
        y_label="ms",
        series=[
            Series("slowest of each hundredth", places, [float(chunk.max()) for chunk in chunks], style="line"),
            Series("median", places, [float(np.median(chunk)) for chunk in chunks], style="line", faint=True),
        ],
    )


def _latencies(http: Sequence[float], inside: Sequence[float]) -> Plot:
    return Plot(
        title="latency by share of the answers",
        x_label="percentile",
        y_label="ms",
        series=[
            Series("HTTP", _PERCENTILES, [percentile(http, q) for q in _PERCENTILES], style="line"),
            Series("in process", _PERCENTILES, [percentile(inside, q) for q in _PERCENTILES], style="line", faint=True),
        ],
    )
