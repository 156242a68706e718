"""What was measured at a point, beside a verdict: a table of both sides, and the rounds as a plot."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from flashrec_harness.httpcost.measure import Half, Measured
from flashrec_harness.load import percentile
from flashrec_harness.outcome import Check, Plot, Series

SUITE = "http-cost"


def fill(found: Measured) -> str:
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


def with_figures(check: Check, found: Measured) -> Check:
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
