"""A lone request's tail: its verdict, and what is said beside it."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest
from http_cost_support import ALONE, LOADS, Simulated, alone, half

from flashrec_harness.httpcost.cells import Share
from flashrec_harness.httpcost.gauge import Gauge
from flashrec_harness.httpcost.measure import Half, Measured, measure
from flashrec_harness.httpcost.sides import Fired
from flashrec_harness.httpcost.tails import tail
from flashrec_harness.outcome import Outcome


@pytest.mark.parametrize(
    ("slow", "times", "outcome"),
    [
        (1, 1.05, Outcome.PASS),
        (10, 1.05, Outcome.PASS),
        (10, 1.5, Outcome.FAIL),  # the plant: one in twenty-five takes half as long again
        (1, 9.0, Outcome.PASS),  # one of 250 is beyond the 99th percentile
    ],
)
def test_the_tail_is_judged_by_its_quantiles(slow: int, times: float, outcome: Outcome) -> None:
    found = tail(alone([10.0] * (250 - slow) + [10.0 * times] * slow))
    assert found.name == "p99 over p50 at concurrency 1: 1000 x 256"
    assert found.outcome is outcome, found.summary


def test_a_tail_that_the_engine_has_too_says_so() -> None:
    times = [10.0] * 240 + [15.0] * 10
    assert "in process" not in tail(alone(times)).reason
    both = Measured(ALONE, 100.0, [half(latencies_ms=times)], [half(latencies_ms=times)])
    assert tail(both).outcome is Outcome.FAIL
    assert "in process it is, too" in tail(both).reason


@pytest.mark.parametrize("times", [1.0, 3.0])
def test_a_p99_of_few_answers_is_not_judged(times: float) -> None:
    found = tail(alone([10.0] * 140 + [10.0 * times] * 10))
    assert found.outcome is Outcome.INCONCLUSIVE
    assert found.reason.startswith("50 more answers are needed")
    assert tail(Measured(ALONE, 1.0, [Half(0.0, [], Counter())], [half()])).outcome is Outcome.INVALID


@pytest.mark.parametrize("steady", [True, False])
def test_a_machine_that_is_not_steady_says_so_and_the_verdict_stands(steady: bool) -> None:
    gauge = [0.5] * 97 + [0.5 if steady else 0.6] * 3
    slow = half(latencies_ms=[10.0] * 240 + [15.0] * 10, gauge_ms=gauge)
    found = tail(Measured(ALONE, 100.0, [slow], [half(latencies_ms=[9.0] * 250)]))
    assert found.outcome is Outcome.FAIL
    assert f"a computation beside it {1.0 if steady else 1.2:.3f}, p50 0.5 ms" in found.summary
    assert ("the machine, or too few cores" in found.reason) is not steady
    assert found.data["gauge ms"] == gauge
    quick = half(latencies_ms=[10.0] * 250, gauge_ms=gauge)
    assert tail(Measured(ALONE, 100.0, [quick], [quick])).outcome is Outcome.PASS


def test_the_gauge_times_one_computation_while_a_round_runs() -> None:
    class Slow(Simulated):
        def load(self, load: list[Share]) -> Fired:
            time.sleep(0.3)
            return super().load(load)

    with Gauge() as gauge:
        deadline = time.monotonic() + 20
        while not gauge.take():  # until it runs
            assert time.monotonic() < deadline
            time.sleep(0.05)
        start = time.monotonic()
        found = measure(ALONE, Slow(100), Slow(100), LOADS, pace=20.0, seconds=0.1, rounds=1, gauge=gauge)
        most = (time.monotonic() - start) / 0.02 + 1  # one in 20 ms
        pid = gauge._process.pid
    assert 2 <= len(found.http[0].gauge_ms) <= most
    assert 2 <= len(found.inside[0].gauge_ms) <= most
    assert all(ms > 0.05 for ms in found.http[0].gauge_ms)
    assert not Path(f"/proc/{pid}").exists()


def test_the_first_answers_of_each_round_count_and_are_shown() -> None:
    waking, steady = [30.0, 20.0, 15.0, 13.0, 12.0], [10.0] * 50
    rounds = [half(latencies_ms=waking + steady) for _ in range(4)]
    found = tail(Measured(ALONE, 100.0, rounds, rounds))
    assert found.outcome is Outcome.FAIL, "a slow first answer is a slow answer"
    assert "without the first 5 of each round 1.000, in process 1.000" in found.summary
    assert found.data["waking ms"] == found.data["waking ms in process"] == [waking] * 4


def test_rounds_that_differ_are_told_from_a_tail_within_them() -> None:
    levels = [half(latencies_ms=[ms] * 99 + [ms * 1.05] * 2) for ms in (12.0, 10.0, 10.0, 10.0)]
    found = tail(Measured(ALONE, 100.0, levels, levels))
    assert found.outcome is Outcome.FAIL, "together they are one tail"
    assert "; its rounds 1.050 to 1.050, p50 10 to 12 ms" in found.summary
    assert found.data["p50 ms of each round"] == [12.0, 10.0, 10.0, 10.0]
    assert found.data["p99 over p50 of each round"] == [1.05] * 4
    assert "its rounds" not in tail(alone([10.0] * 250)).summary


def test_a_burst_of_slow_answers_shows_when_it_was() -> None:
    times = [8.0] * 1000
    times[420:430] = [12.0] * 10
    plot = next(plot for plot in tail(alone(times)).plots if "round after round" in plot.title)
    slowest, median = plot.series
    assert [place for place, ms in zip(slowest.x, slowest.y, strict=True) if ms == 12.0] == [420]
    assert set(median.y) == {8.0, 12.0}
    assert len(slowest.x) == 100


def test_enough_answers_are_sent_at_concurrency_1() -> None:
    slow = Simulated(5)
    found = measure(ALONE, slow, Simulated(5), LOADS, pace=5.0, seconds=1.0, rounds=3)
    assert sum(len(one.latencies_ms) for one in found.http) >= 200
