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
from http_cost_support import ALONE, AT_8, BEAMS, Simulated, alone, half, simulated
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
from flashrec_harness.httpcost.cells import SMALL, Point, compared, points, shares
from flashrec_harness.httpcost.clients import Clients
from flashrec_harness.httpcost.measure import Loads, Measured, measure
from flashrec_harness.httpcost.sides import InProcess, Served, engine_flags
from flashrec_harness.httpcost.suite import HttpCostSettings, run
from flashrec_harness.outcome import Check, Outcome, SuiteContext
from flashrec_harness.perf.workload import Cell, Workload, load_workload
from flashrec_harness.servers import free_port

SHOP = Path("engine/flashrec/assets/tiny-shop")


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
