"""The cost of HTTP: what is compared, when it passes, and that a slower, jittery or wrong server turns it red."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest
from server_support import running

from flashrec import Engine, EngineConfig
from flashrec.errors import ConfigError
from flashrec.request import BeamArrays
from flashrec.runtime.scheduler import Scheduler
from flashrec.server import jobs
from flashrec.server.config import ServerConfig
from flashrec_harness import budget, hardware
from flashrec_harness.determinism.records import OutputBeam, float_bits
from flashrec_harness.httpcost import judge, suite
from flashrec_harness.httpcost.bits import bits_of_arrays, bits_of_json
from flashrec_harness.httpcost.cells import SMALL, Point, Share, compared, points, shares
from flashrec_harness.httpcost.clients import Clients
from flashrec_harness.httpcost.gauge import Gauge
from flashrec_harness.httpcost.measure import Half, Loads, Measured, measure
from flashrec_harness.httpcost.sides import Counters, Fired, InProcess, Served, engine_flags
from flashrec_harness.httpcost.suite import HttpCostSettings, run
from flashrec_harness.httpcost.tails import tail
from flashrec_harness.outcome import Check, Outcome, SuiteContext
from flashrec_harness.overload.fleet import Shot
from flashrec_harness.perf.workload import Cell, Workload, load_workload
from flashrec_harness.servers import free_port

SHOP = Path("engine/flashrec/assets/tiny-shop")
AT_8, ALONE = Point(1000, 256, 8), Point(1000, 256, 1)
BEAMS = (OutputBeam((5, 6, 7), float_bits(-1.5), float_bits(-0.5)), OutputBeam((5, 6, 8), float_bits(-2.5), "00000000"))
LOADS = Loads(seed=0, clients=4, vocabulary=100, max_tokens=None)


class Simulated:
    """A side that answers ``rate`` requests a second, times ``1 + wobble`` and ``1 - wobble`` in turn, in waves of
    four; ``status`` and ``beams`` are every answer's. The first load is the warm-up."""

    def __init__(
        self, rate: float, *, wobble: float = 0.0, status: int = 200, beams: tuple[OutputBeam, ...] = BEAMS
    ) -> None:
        self._rate, self._wobble, self._status, self._beams = rate, wobble, status, beams
        self.loads: list[list[Share]] = []
        self._sent = 0

    def load(self, load: list[Share]) -> Fired:
        self.loads.append(load)
        count = sum(share.count for share in load)
        self._sent += count
        rate = self._rate * (1 + self._wobble * (-1) ** len(self.loads))
        shots = [Shot(self._status, 0.01, index / rate) for index in range(count)]
        kept = {(number, index): self._beams for number in range(len(load)) for index in compared(load, number)}
        return Fired(shots, kept if self._status == 200 else {})

    def counters(self) -> Counters:
        return Counters(self._sent // 4, 0, {"engine": self._sent * 0.002})


def simulated(http: Simulated, inside: Simulated, *, point: Point = AT_8, rounds: int = 4) -> Measured:
    return measure(point, http, inside, LOADS, pace=100.0, seconds=1.0, rounds=rounds)


def half(rate: float = 100.0, latencies_ms: list[float] | None = None, **changes: Any) -> Half:
    times = latencies_ms or [10.0]
    return Half(rate, times, Counter({200: len(times)}), **changes)


def alone(times: list[float]) -> Measured:
    return Measured(ALONE, 100.0, [half(latencies_ms=times)], [half(latencies_ms=[9.0] * len(times))])


@pytest.mark.parametrize(
    ("kept", "wobble", "outcome"),
    [
        (0.98, 0.005, Outcome.PASS),
        (0.8, 0.005, Outcome.FAIL),  # the plant: a server that is a fifth slower
        (0.92, 0.05, Outcome.INCONCLUSIVE),  # above by its mean: not enough
        (0.88, 0.05, Outcome.INCONCLUSIVE),
    ],
)
def test_throughput_is_judged_by_its_interval(kept: float, wobble: float, outcome: Outcome) -> None:
    found = judge.throughput(simulated(Simulated(100 * kept, wobble=wobble), Simulated(100)))
    assert found.name == "HTTP keeps 90% of in-process: 1000 x 256 at 8"
    assert found.outcome is outcome, found.summary
    assert ("--rounds" in found.reason) is (outcome is Outcome.INCONCLUSIVE)


def test_the_interval_is_student_s_on_the_logarithms() -> None:
    """By hand: logs 0 and 0.2, mean 0.1, standard error 0.1; the t quantile of one degree of freedom is 12.706."""
    found = judge.share_kept([100.0, 50.0], [100.0, 50.0 * math.exp(0.2)])
    assert found == pytest.approx((math.exp(0.1), math.exp(0.1 - 1.2706), math.exp(0.1 + 1.2706)), rel=1e-4)


def test_a_drift_of_the_machine_does_not_decide() -> None:
    """Slower by 3 % with each measurement: ABBA leaves the mean ratio where it is; HTTP always second would not."""
    speeds = [0.97**place for place in range(8)]
    order = "ABBAABBA"
    http = [speed for speed, side in zip(speeds, order, strict=True) if side == "A"]
    inside = [speed for speed, side in zip(speeds, order, strict=True) if side == "B"]
    assert judge.share_kept(inside, http)[0] == pytest.approx(1.0)
    assert judge.share_kept(speeds[::2], speeds[1::2])[0] == pytest.approx(0.97)


def test_one_round_is_no_interval() -> None:
    found = judge.throughput(simulated(Simulated(80), Simulated(100), rounds=1))
    assert found.outcome is Outcome.INCONCLUSIVE
    assert "0.800" in found.reason
    assert "--rounds 2" in found.reason


def test_a_side_without_answers_has_no_throughput() -> None:
    found = simulated(Simulated(100, status=503), Simulated(100))
    assert judge.throughput(found).outcome is Outcome.INVALID


def test_a_round_is_the_same_work_on_both_sides_and_no_prompt_comes_twice() -> None:
    http, inside = Simulated(100), Simulated(100)
    simulated(http, inside, rounds=3)
    assert http.loads == inside.loads
    assert len(http.loads) == 4  # the warm-up as well
    prompts = [tuple(prompt) for load in http.loads for share in load for prompt in share.prompts()]
    assert len(prompts) == 3 * 100 + 32
    assert len(set(prompts)) == len(prompts)
    assert {len(prompt) for prompt in prompts} == {1000}


def test_what_a_round_is_made_of_is_counted() -> None:
    found = simulated(Simulated(50, status=200), Simulated(100), rounds=2)
    assert [one.per_wave for one in found.http] == [4.0, 4.0]
    assert found.http[0].rate == pytest.approx(50)
    assert found.http[0].cpu_ms == {"engine": pytest.approx(2.0)}
    rows = {row["figure"]: row for row in judge.throughput(found).rows}
    assert rows["round 1: requests/s"]["HTTP over in process"] == pytest.approx(0.5)
    assert rows["requests per wave"]["HTTP"] == 4.0
    assert rows["CPU ms per request: engine"]["HTTP"] == 2.0
    assert "4.00 (50% of 8) over HTTP" in judge.throughput(found).summary


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


def test_every_answer_must_arrive_those_of_the_warm_up_too() -> None:
    good, bad = half(), dataclasses.replace(half(), statuses=Counter({200: 9, 503: 1}))
    assert judge.arrived([Measured(AT_8, 1.0, [good], [good])], Counter({200: 9})).outcome is Outcome.PASS
    assert judge.arrived([Measured(AT_8, 1.0, [bad], [good])], Counter()).outcome is Outcome.FAIL
    assert judge.arrived([Measured(AT_8, 1.0, [good], [good], Counter({0: 1}))], Counter()).outcome is Outcome.FAIL
    before = judge.arrived([Measured(AT_8, 1.0, [good], [good])], Counter({200: 9, 503: 1}))
    assert (before.outcome, before.rows[0]["point"]) == (Outcome.FAIL, "before all points")
    assert judge.arrived([], Counter()).outcome is Outcome.INVALID


def test_a_request_without_an_answer_is_counted() -> None:
    """Nobody listens at the port: each request fails, and none is lost."""
    point = Point(4, 2, 3)
    load = shares(point, (0,), 7, 1, vocabulary=50)
    with Clients(1) as clients:
        clients.await_start()
        shots, kept = clients.load(f"http://127.0.0.1:{free_port()}", load)
    assert [shot.status for shot in shots] == [0] * 7
    assert kept == {}


def changed(**fields: Any) -> tuple[OutputBeam, ...]:
    return (dataclasses.replace(BEAMS[0], **fields), BEAMS[1])


@pytest.mark.parametrize(
    "wrong",
    [
        changed(score_bits=float_bits(float(np.nextafter(np.float32(-0.5), np.float32(0.0))))),
        changed(cumulative_bits=float_bits(float(np.nextafter(np.float32(-1.5), np.float32(0.0))))),
        changed(token_ids=(5, 6, 9)),
        BEAMS[:1],
        BEAMS[::-1],
    ],
)
def test_one_changed_bit_of_an_answer_is_found(wrong: tuple[OutputBeam, ...]) -> None:
    right = simulated(Simulated(100), Simulated(100))
    assert judge.same_answers([right]).outcome is Outcome.PASS
    assert "of 16 answers" in judge.same_answers([right]).summary  # four in each round
    found = judge.same_answers([right, simulated(Simulated(100, beams=wrong), Simulated(100))])
    assert found.outcome is Outcome.FAIL
    assert found.reason


def test_a_point_without_a_compared_answer_is_not_passed() -> None:
    nothing = Measured(AT_8, 1.0, [half()], [half()])
    assert judge.same_answers([nothing]).outcome is Outcome.INVALID
    assert judge.same_answers([]).outcome is Outcome.INVALID


def test_both_sides_answers_are_read_to_the_bit() -> None:
    """A score that no short decimal is: float32(0.1) is 0.10000000149..., which JSON must carry as a float64."""
    tokens, totals = np.array([[1, 2], [3, 4]], np.int32), np.array([-0.1, -1e-8], np.float32)
    arrays = BeamArrays(tokens, totals, totals / np.float32(3), np.zeros(2, np.int32))
    beams = [
        {
            "output_ids": row.tolist(),
            "meta_info": {"cumulative_logprob": float(total), "sequence_score": float(total / np.float32(3))},
        }
        for row, total in zip(tokens, totals, strict=True)
    ]
    content = orjson.dumps({"meta_info": {"beam_results": beams}})
    assert bits_of_json(content) == bits_of_arrays(arrays)
    assert bits_of_json(content)[0].cumulative_bits == totals[:1].tobytes().hex()


def test_the_points_are_those_of_the_workload_file() -> None:
    found = points(load_workload("anchors"))
    assert set(found) == {
        *(Point(2465, 50, at_once) for at_once in (1, 8, 32)),
        *(Point(303, 50, at_once) for at_once in (1, 32)),
        *(Point(context, n, at_once) for context, n in ((2465, 512), (1000, 256), (5000, 256)) for at_once in (1, 8)),
    }
    assert len(found) == 11


def test_concurrency_1_is_added_and_histories_are_refused() -> None:
    only = Workload(name="w", cells=(Cell(n=4, concurrency=8, context=64),))
    assert points(only) == (Point(64, 4, 1), Point(64, 4, 8))
    with pytest.raises(ConfigError, match="context"):
        points(Workload(name="w", cells=(Cell(n=4),)))


def test_the_menu_is_the_workload_on_a_gpu_and_small_elsewhere() -> None:
    chosen, engine = suite.menu(quick=False, gpu=True)
    assert chosen == points(load_workload("anchors"))
    assert engine["quantization"] == "fp8"
    assert engine["max_context"] == 5120
    assert suite.menu(quick=True, gpu=True)[0] == suite.menu(quick=False, gpu=False)[0] == SMALL
    assert suite.menu(quick=True, gpu=True)[1]["quantization"] == "fp8"
    assert "quantization" not in suite.menu(quick=False, gpu=False)[1]


def test_points_can_be_chosen_by_how_many_requests_are_at_once() -> None:
    every = (Point(10, 4, 1), Point(10, 4, 8), Point(20, 4, 1))
    assert suite._at(every, None) == every
    assert suite._at(every, 1) == (every[0], every[2])
    with pytest.raises(ConfigError, match="--at 2: no point has so many requests at once; there are some with 1, 8"):
        suite._at(every, 2)


def test_a_time_budget_costs_points_and_never_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Points of a minute each by a clock of the test's; the budget ends between two, in one, or not at all."""
    for minutes, expected in ((None, 5), (2.5, 2), (3.0, 3), (0.5, 0)):
        clock = [100.0]
        end = None if minutes is None else 100.0 + 60 * minutes

        def measure_one(clock: list[float] = clock, end: float | None = end) -> Measured:
            clock[0] += 60
            if end is not None and clock[0] > end:
                raise budget.BudgetSpent  # the alarm
            return alone([10.0])

        with monkeypatch.context() as patch:
            patch.setattr(budget, "seconds_left", lambda clock=clock, end=end: end and end - clock[0])
            patch.setattr(time, "monotonic", lambda clock=clock: clock[0])
            assert len(suite.while_time_lasts([measure_one] * 5)) == expected
    with budget.within(0.001):
        budget.release()
        time.sleep(0.1)  # and no alarm
        assert budget.seconds_left() is None
    left_out = suite._cut_short([AT_8, ALONE])
    assert left_out.outcome is Outcome.INCONCLUSIVE
    assert left_out.summary == "not measured: 1000 x 256 at 8, 1000 x 256 at 1"


def test_a_load_is_divided_evenly() -> None:
    divided = shares(Point(10, 4, 32), (7,), 101, 5, vocabulary=50)
    assert [share.concurrency for share in divided] == [7, 7, 6, 6, 6]
    assert [share.count for share in divided] == [21, 20, 20, 20, 20]
    assert len({share.seed for share in divided}) == 5
    (one,) = shares(Point(10, 4, 1), (7,), 3, 8, vocabulary=50, max_tokens=3)
    assert (one.count, one.concurrency, one.parameters()["max_new_tokens"]) == (3, 1, 3)
    assert compared([one], 0) == {0, 1, 2}
    assert all(0 <= token < 50 for prompt in one.prompts() for token in prompt)


def test_the_server_gets_the_engine_s_settings_as_flags() -> None:
    flags = engine_flags({"quantization": "fp8", "max_rows": 4096, "invariance_check": False, "record_ledger": True})
    assert flags == ("--quantization", "fp8", "--max-rows", "4096", "--no-invariance-check", "--record-ledger")


def test_settings_that_measure_nothing_are_refused() -> None:
    for wrong in ({"rounds": 0}, {"clients": 0}, {"seconds": 0.0}):
        with pytest.raises(ConfigError, match="rounds, clients, seconds"):
            HttpCostSettings(**wrong)


def outcomes(checks: list[Check]) -> Mapping[str, Outcome]:
    return {check.name: check.outcome for check in checks}


@pytest.mark.alone
@pytest.mark.slow
def test_a_server_is_measured_against_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two busy cores decide nothing about speed: all must arrive, with the engine's bits, and be counted."""
    for name, least in (("TAIL_REQUESTS", 20), ("_LEAST_WAVES", 3)):
        monkeypatch.setattr(f"flashrec_harness.httpcost.measure.{name}", least)
    context = SuiteContext(model_path=SHOP, sid_vocab_file=SHOP / "items.tsv", quick=True, out_dir=tmp_path)
    stolen = itertools.count()
    monkeypatch.setattr(hardware, "stolen_s", lambda: float(next(stolen)))
    settings = HttpCostSettings(seconds=0.5, rounds=2, clients=2, http_processes=1)
    checks = run(context, settings)
    found = outcomes(checks)
    assert found["every answer arrived"] is found["answers are those given in process"] is Outcome.PASS
    assert len(found) == 2 + len(SMALL)
    for check in checks[: len(SMALL)]:
        assert check.outcome is not Outcome.INVALID, check.reason
        rows = {row["figure"]: row for row in check.rows}
        assert rows["requests per wave"]["HTTP"] >= 1
        assert rows["prompt tokens found cached"]["HTTP"] == rows["prompt tokens found cached"]["in process"] == 0
        assert rows["CPU ms per request: front 1"]["HTTP"] > 0
        assert rows["CPU ms per request: engine"]["HTTP"] > 0
        assert rows["CPU ms per request: taken by the host"]["in process"] > 0
        assert (check.data["server"]["http_processes"], check.data["server"]["busy_poll"]) == (1, False)


def engine() -> Engine:
    config = EngineConfig(
        model_path=SHOP,
        sid_vocab_file=SHOP / "items.tsv",
        device="cpu",
        kv_pool_tokens=16384,
        max_beam_width=32,
        invariance_check=False,
    )
    return Engine(config)


@pytest.mark.alone
@pytest.mark.slow
def test_a_server_that_takes_its_time_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: each answer holds up the event loop for a tenth of a second, several times what it takes to compute."""
    respond = jobs._respond

    def slow(*arguments: Any) -> Any:
        time.sleep(0.1)
        return respond(*arguments)

    monkeypatch.setattr(jobs, "_respond", slow)
    point, loads = Point(64, 8, 8), Loads(seed=0, clients=2, vocabulary=512, max_tokens=None)
    scheduler, inside = Scheduler(engine()), InProcess(engine())
    scheduler.start()
    inside.start()
    with Clients(2) as clients:
        clients.await_start()
        with running(scheduler, ServerConfig(port=0)) as server:
            here: Any = SimpleNamespace(url=f"http://127.0.0.1:{server.port}", process=SimpleNamespace(pid=os.getpid()))
            found = measure(point, Served(here, clients), inside, loads, pace=20.0, seconds=2.0, rounds=5)
    inside.close()
    assert judge.throughput(found).outcome is Outcome.FAIL, judge.throughput(found).summary
    assert judge.same_answers([found]).outcome is Outcome.PASS
    assert judge.arrived([found], Counter()).outcome is Outcome.PASS
