"""Open loop over a sweep of rates: how many Poisson arrivals a second are answered within a latency target."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flashrec_harness.load import LoadResult, percentile
from flashrec_harness.outcome import Band, Check, Outcome, Plot, Series
from flashrec_harness.perf.subjects import Subject
from flashrec_harness.perf.workload import Sweep, Workload

_FEWEST = 20
"""Requests at the lowest rates, however short the time."""


@dataclass(frozen=True, slots=True)
class Point:
    """One rate: a ``share`` of the process's capacity. Rates in requests per second, latencies from the arrival."""

    share: float
    rate: float
    throughput: float
    goodput: float
    p50_ms: float
    p99_ms: float
    failures: int


def measure_sweep(subject: Subject, sweep: Sweep, seed: int) -> dict[str, Any]:
    """The capacity of a closed loop, then one open loop at each share of it, of a prepared subject; plain data."""
    before = subject.flush if sweep.context is not None else lambda: None

    def closed(requests: int) -> float:
        before()
        return subject.closed(requests, sweep.concurrency).throughput

    closed(2 * sweep.concurrency)
    pilot = closed(4 * sweep.concurrency)
    capacity = closed(max(4 * sweep.concurrency, round(pilot * sweep.seconds)))
    points = []
    for share in sweep.shares:
        rate = share * capacity
        requests = max(_FEWEST, round(rate * sweep.seconds))
        before()
        points.append(asdict(_point(share, rate, subject.open(requests, rate, seed), sweep.target_ms)))
    return {"capacity": capacity, "points": points}


def _point(share: float, rate: float, result: LoadResult, target_ms: float) -> Point:
    latencies = result.latencies_ms or [float("inf")]
    return Point(
        share=share,
        rate=rate,
        throughput=result.throughput,
        goodput=result.goodput(target_ms),
        p50_ms=percentile(latencies, 50),
        p99_ms=percentile(latencies, 99),
        failures=len(result.failures),
    )


def check(processes: Sequence[Mapping[str, Any]], workload: Workload) -> list[Check]:
    """From what :func:`measure_sweep` found in each process: the curve of medians, and the highest rate whose p99
    keeps the target. Nothing without a sweep."""
    sweep = workload.sweep
    runs = [found for found in processes if found]
    if sweep is None or not runs:
        return []
    capacity = statistics.median(run["capacity"] for run in runs)
    curve = [_median([Point(**run["points"][index]) for run in runs]) for index in range(len(sweep.shares))]
    kept = [point for point in curve if point.p99_ms <= sweep.target_ms and not point.failures]
    best = max(kept, key=lambda point: point.rate, default=None)
    reached = (
        f"p99 stays within {sweep.target_ms:g} ms up to {best.rate:.4g} arrivals/s, {best.share:.0%} of the closed "
        f"loop's {capacity:.4g} req/s"
        if best
        else f"p99 is above {sweep.target_ms:g} ms at every rate, from {curve[0].rate:.4g} arrivals/s on"
    )
    peak = max(curve, key=lambda point: point.goodput)
    return [
        Check(
            "perf",
            "goodput over Poisson arrivals",
            Outcome.PASS,
            f"n = {sweep.n}: {reached}; most answers within the target: {peak.goodput:.4g}/s at {peak.rate:.4g} "
            "arrivals/s",
            rows=[_row(point, sweep) for point in curve],
            data={"capacity": capacity, "curve": [asdict(point) for point in curve], "processes": list(runs)},
            printed=True,
            plots=[_goodput_plot(curve, capacity), _latency_plot(curve, sweep)],
        )
    ]


def _median(points: Sequence[Point]) -> Point:
    figures = {name: statistics.median(getattr(point, name) for point in points) for name in Point.__slots__}
    return Point(**figures | {"failures": sum(point.failures for point in points)})


def _row(point: Point, sweep: Sweep) -> dict[str, Any]:
    return {
        "share of capacity": f"{point.share:.0%}",
        "arrivals/s": round(point.rate, 2),
        "answered/s": round(point.throughput, 2),
        f"good/s ({sweep.target_ms:g} ms)": round(point.goodput, 2),
        "p50 ms": round(point.p50_ms, 2),
        "p99 ms": round(point.p99_ms, 2),
        "p99 kept": "yes" if point.p99_ms <= sweep.target_ms else "no",
        "failed": point.failures,
    }


def _goodput_plot(curve: Sequence[Point], capacity: float) -> Plot:
    rates = [point.rate for point in curve]
    return Plot(
        title="goodput over arrival rate",
        x_label="arrivals/s",
        y_label="requests/s",
        series=[
            Series("answered", rates, [point.throughput for point in curve], style="line", faint=True),
            Series("answered within the target", rates, [point.goodput for point in curve], style="line"),
            Series(
                "capacity of the closed loop", [rates[0], rates[-1]], [capacity, capacity], style="line", faint=True
            ),
        ],
    )


def _latency_plot(curve: Sequence[Point], sweep: Sweep) -> Plot:
    rates = [point.rate for point in curve]
    low = min(point.p50_ms for point in curve)
    return Plot(
        title="latency over arrival rate",
        x_label="arrivals/s",
        y_label="ms",
        series=[
            Series("p50", rates, [point.p50_ms for point in curve], style="line"),
            Series("p99", rates, [point.p99_ms for point in curve], style="line"),
        ],
        bands=[Band(min(low, sweep.target_ms), sweep.target_ms, "target")],
        log_y=True,
    )
