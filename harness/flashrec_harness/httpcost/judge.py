"""From rounds to checks: throughput by paired intervals, the tail by its quantiles, answers by their bits."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from flashrec_harness import stats
from flashrec_harness.determinism.ledger_diff import first_beam
from flashrec_harness.httpcost.cells import TAIL_REQUESTS, WAKING
from flashrec_harness.httpcost.measure import Half, Measured
from flashrec_harness.load import percentile
from flashrec_harness.outcome import Check, Outcome, Plot, Series

SUITE = "http-cost"
KEPT = 0.9
"""Share of the throughput in process that HTTP must keep."""
TAIL = 1.1
"""Highest p99 over p50 at concurrency 1."""
CONFIDENCE = 0.95
_SHOWN = 20
_CHUNKS = 100
_PERCENTILES = [step / 2 for step in range(201)]


def share_kept(inside: Sequence[float], http: Sequence[float]) -> tuple[float, float, float]:
    """Mean ratio HTTP to in process over the pairs of rounds, and its interval (Student's t on the logarithms).

    Raises ``ValueError`` below two pairs, or where a rate is not positive.
    """
    found = stats.paired_interval(inside, http, confidence=CONFIDENCE)
    return math.exp(found.mean), math.exp(found.low), math.exp(found.high)


def throughput(found: Measured) -> Check:
    """Whether HTTP keeps :data:`KEPT` at one point: *inconclusive* where the interval holds it, or is none."""
    name = f"HTTP keeps {KEPT:.0%} of in-process: {found.point.name}"
    http, inside = [half.rate for half in found.http], [half.rate for half in found.inside]
    figures = f"{statistics.median(http):.4g} of {statistics.median(inside):.4g} req/s (medians of {len(http)} rounds; "
    figures += f"lockstep {found.lockstep:.4g}); {_fill(found)}"
    if not all(rate > 0 for rate in (*http, *inside)):
        return _with_figures(
            Check(SUITE, name, Outcome.INVALID, figures, "a round has too few answers for a rate"), found
        )
    if len(http) < 2:
        reason = f"one round, ratio {http[0] / inside[0]:.3f}, has no interval: run --rounds 2 or more"
        return _with_figures(Check(SUITE, name, Outcome.INCONCLUSIVE, figures, reason), found)
    mean, low, high = share_kept(inside, http)
    outcome = Outcome.PASS if low >= KEPT else Outcome.FAIL if high < KEPT else Outcome.INCONCLUSIVE
    reason = f"HTTP keeps {low:.3f} to {high:.3f} of the throughput in process"
    if outcome is Outcome.INCONCLUSIVE:
        reason += ": run more --rounds, longer --seconds, or on a quieter machine"
    check = Check(
        SUITE,
        name,
        outcome,
        f"{mean:.3f} ({CONFIDENCE:.0%} interval {low:.3f} to {high:.3f}, wanted from {KEPT:g} on): {figures}",
        reason="" if outcome is Outcome.PASS else reason,
    )
    return _with_figures(check, found)


def tail(found: Measured) -> Check:
    """p99 over p50 of the answers over HTTP, all rounds together; ``found`` is measured at concurrency 1.

    A round's first answers open a connection and wake what slept while the other side had its round. They count; what
    the ratio is without them is shown beside.
    """
    name = f"p99 over p50 at concurrency 1: {found.point.row}"
    times = [ms for half in found.http for ms in half.latencies_ms]
    if not times:
        return Check(SUITE, name, Outcome.INVALID, "", reason="no request was answered")
    p50, p99 = percentile(times, 50), percentile(times, 99)
    ratio = p99 / p50
    inside = [ms for half in found.inside for ms in half.latencies_ms]
    outcome = Outcome.PASS if ratio <= TAIL else Outcome.FAIL
    own = percentile(inside, 99) / percentile(inside, 50)
    reason = "" if ratio <= TAIL else f"p99 is {ratio:.3f} of p50, more than {TAIL:g}"
    reason += "; in process it is, too: engine or machine" * (min(ratio, own) > TAIL)
    if len(times) < TAIL_REQUESTS:
        missing = TAIL_REQUESTS - len(times)
        outcome, reason = Outcome.INCONCLUSIVE, f"{missing} more answers are needed: longer --seconds, or more --rounds"
    check = Check(
        SUITE,
        name,
        outcome,
        f"{ratio:.3f} (wanted at most {TAIL:g}): p50 {p50:.3g} ms, p99 {p99:.3g} ms of {len(times)} answers; in "
        f"process {own:.3f}, p50 {percentile(inside, 50):.3g} ms; without the first {WAKING} of each round "
        f"{_awake(found.http)}, in process {_awake(found.inside)}",
        reason=reason,
        plots=[_latencies(times, inside), _through(times)],
    )
    check = _with_figures(check, found)
    check.data["waking ms"] = [half.latencies_ms[:WAKING] for half in found.http]
    check.data["waking ms in process"] = [half.latencies_ms[:WAKING] for half in found.inside]
    return check


def _awake(side: Sequence[Half]) -> str:
    """p99 over p50 without the first answers of each round."""
    times = [ms for half in side for ms in half.latencies_ms[WAKING:]]
    return f"{percentile(times, 99) / percentile(times, 50):.3f}" if times else "unknown"


def arrived(every: Sequence[Measured], woken: Counter[int]) -> Check:
    """Whether each request over HTTP got a 200, those of the warm-up as well, and those before any point: ``woken``."""
    by_point = {one.point.name: sum((half.statuses for half in one.http), Counter(one.warm_up)) for one in every}
    by_point |= {"before all points": woken}
    total = sum(by_point.values(), Counter[int]())
    bad = total.total() - total[200]
    rows = [
        {"point": name, **{str(status): count for status, count in sorted(found.items())}}
        for name, found in by_point.items()
        if found.total() > found[200]
    ]
    return Check(
        SUITE,
        "every answer arrived",
        Outcome.FAIL if bad else Outcome.PASS if total[200] else Outcome.INVALID,
        f"{total[200]} of {total.total()} requests over {len(every)} points were answered 200",
        reason=f"{bad} were not; statuses {dict(sorted(total.items()))} (0: no answer)" if bad else "",
        rows=rows,
    )


def same_answers(every: Sequence[Measured]) -> Check:
    """Whether answers over HTTP, under load, have the tokens and score bits that the same prompts got in process."""
    compared, different, blind = 0, list[dict[str, Any]](), list[str]()
    for one in every:
        before = compared
        for number, (http, inside) in enumerate(zip(one.http, one.inside, strict=True)):
            for place in sorted(http.kept.keys() & inside.kept.keys()):
                compared += 1
                if http.kept[place] != inside.kept[place]:
                    output = first_beam(inside.kept[place], http.kept[place])
                    different.append(
                        {"point": one.point.name, "round": number + 1, "request": str(place), "what": output}
                    )
        blind += [one.point.name] * (compared == before)
    reason = f"{different[0]['point']}: {different[0]['what']}" if different else ""
    if blind and not different:
        reason = f"no answer was compared at {', '.join(blind)}"
    return Check(
        SUITE,
        "answers are those given in process",
        Outcome.FAIL if different else Outcome.INVALID if blind or not every else Outcome.PASS,
        f"{len(different)} of {compared} answers under load differ in tokens or score bits, {len(every)} points",
        reason=reason,
        rows=different[:_SHOWN],
    )


def _fill(found: Measured) -> str:
    """Requests per wave, and what share of the requests at once that is."""
    shown = (
        f"{mean:.2f} ({mean / found.point.concurrency:.0%} of {found.point.concurrency}) {where}"
        for mean, where in (
            (_per_wave(found.http), "over HTTP"),
            (_per_wave(found.inside), "in process"),
        )
    )
    return f"requests per wave {', '.join(shown)}"


def _per_wave(side: Sequence[Half]) -> float:
    return statistics.median(half.per_wave for half in side)


def _with_figures(check: Check, found: Measured) -> Check:
    """Add what was measured as a table, each figure of both sides, and the rounds as a plot."""
    rows = [_figure(f"round {number}: requests/s", pair[0].rate, pair[1].rate) for number, pair in _rounds(found)]
    rows.append(_figure("requests per wave", _per_wave(found.http), _per_wave(found.inside)))
    rows += [_figure(f"p{q}, ms", *(_percentile(side, q) for side in (found.http, found.inside))) for q in (50, 99)]
    cached = [sum(half.hit_tokens for half in side) for side in (found.http, found.inside)]
    rows.append(_figure("prompt tokens found cached", *cached))
    for name in dict.fromkeys(name for half in (*found.http, *found.inside) for name in half.cpu_ms):
        spent = [_cpu_ms(side, name) for side in (found.http, found.inside)]
        rows.append(_figure(f"CPU ms per request: {name}", *spent))
    check.rows = rows
    check.data = {
        "http": [half.rate for half in found.http],
        "in process": [half.rate for half in found.inside],
        "lockstep": found.lockstep,
    }
    numbers = list(range(len(found.http)))
    check.plots.append(
        Plot(
            title=f"requests per second, {found.point.name}",
            x_label="round",
            y_label="requests/s",
            series=[
                Series("HTTP", numbers, [half.rate for half in found.http]),
                Series("in process", numbers, [half.rate for half in found.inside]),
            ],
            x_ticks=[str(number + 1) for number in numbers],
        )
    )
    return check


def _rounds(found: Measured) -> Sequence[tuple[int, tuple[Half, Half]]]:
    return list(enumerate(zip(found.http, found.inside, strict=True), 1))


def _percentile(side: Sequence[Half], q: float) -> float | None:
    times = [ms for half in side for ms in half.latencies_ms]
    return percentile(times, q) if times else None


def _cpu_ms(side: Sequence[Half], name: str) -> float | None:
    spent = [half.cpu_ms[name] for half in side if name in half.cpu_ms]
    return statistics.mean(spent) if spent else None


def _figure(name: str, http: float | None, inside: float | None) -> dict[str, Any]:
    over = http / inside if http is not None and inside else None
    return {
        "figure": name,
        **{
            side: "" if value is None else round(value, 3)
            for side, value in (("HTTP", http), ("in process", inside), ("HTTP over in process", over))
        },
    }


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
