"""Overload: the arithmetic of its verdicts, and a server that keeps its goodput, or does not."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from server_support import running

from flashrec import Engine, EngineConfig
from flashrec.runtime.scheduler import Scheduler
from flashrec.server import jobs
from flashrec.server.config import ServerConfig
from flashrec_harness.outcome import Outcome, SuiteContext
from flashrec_harness.overload import OverloadSettings, run, suite
from flashrec_harness.overload.fleet import Shot, steady_rate
from flashrec_harness.overload.suite import Round

SHOP = Path("engine/flashrec/assets/tiny-shop")
SETTINGS = OverloadSettings(n=16, seconds=2.0, rounds=2, places=24)


def context(directory: Path, url: str | None = None) -> SuiteContext:
    return SuiteContext(model_path=SHOP, sid_vocab_file=SHOP / "items.tsv", url=url, out_dir=directory)


def test_the_steady_rate_leaves_out_filling_up_and_running_dry() -> None:
    """50 answers at 10/s, after 5 s of nothing but one, and before 7 s of nothing but one; refusals do not count."""
    ends = [0.0, *(5 + index / 10 for index in range(50)), 17.0]
    shots = [Shot(200, 0.1, end) for end in ends] + [Shot(503, 0.001, index / 100) for index in range(1700)]
    random.Random(0).shuffle(shots)
    assert steady_rate(shots) == pytest.approx(10.0)
    assert steady_rate([]) == 0.0


def rounds(*ratios: float, factor: float = 4.0) -> list[Round]:
    return [Round(100.0, 100 * factor, 100 * ratio, 100.0) for ratio in ratios]


@pytest.mark.parametrize(
    ("ratios", "outcome"),
    [
        ((1.0, 0.97, 0.99), Outcome.PASS),
        ((0.5, 0.52, 0.51), Outcome.FAIL),
        ((0.6, 0.85, 1.1), Outcome.INCONCLUSIVE),
        ((0.7, 1.2, 1.9), Outcome.INCONCLUSIVE),
    ],
)
def test_goodput_is_judged_by_its_interval(ratios: tuple[float, ...], outcome: Outcome) -> None:
    assert suite._goodput(rounds(*ratios), OverloadSettings()).outcome is outcome


def test_the_interval_is_student_s() -> None:
    """By hand: logs 0 and 0.2, mean 0.1, standard error 0.1, t quantile 12.706."""
    low, high = suite.interval([1.0, 1.2214027581601699])
    assert (low, high) == pytest.approx((0.31013, 3.93833), rel=1e-3)


def test_a_load_that_is_no_overload_is_invalid() -> None:
    shots = [Shot(200, 1.0, 1.0), Shot(503, 0.01, 1.0)]
    assert suite._offered(rounds(1, 1), shots, OverloadSettings()).outcome is Outcome.PASS
    assert suite._offered(rounds(1, 1, factor=2.0), shots, OverloadSettings()).outcome is Outcome.INVALID
    assert suite._offered(rounds(1, 1), shots[:1], OverloadSettings()).outcome is Outcome.INVALID


def test_a_refusal_must_come_long_before_an_answer() -> None:
    answers = [Shot(200, 1.0, 1.0)] * 10
    assert suite._refusals([*answers, *[Shot(503, 0.02, 1.0)] * 100]).outcome is Outcome.PASS
    assert (
        suite._refusals([*answers, *[Shot(503, 0.02, 1.0)] * 90, *[Shot(503, 0.8, 1.0)] * 10]).outcome is Outcome.FAIL
    )
    assert suite._nothing_else([*answers, Shot(504, 1.0, 1.0)], 200).outcome is Outcome.FAIL
    assert suite._nothing_else(answers, 503).outcome is Outcome.FAIL


@pytest.mark.slow
def test_goodput_stays_at_four_times_the_capacity(tmp_path: Path) -> None:
    """Ratios only: the machine's speed does not matter, and what it does to both sides cancels."""
    found = {check.name: check for check in run(context(tmp_path), SETTINGS)}
    for check in found.values():
        assert check.outcome in (Outcome.PASS, Outcome.INCONCLUSIVE), f"{check.name}: {check.reason}; {check.summary}"
    assert found["refusals are quick"].outcome is Outcome.PASS


@pytest.mark.slow
def test_refusals_that_cost_as_much_as_an_answer_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: each refusal holds up the event loop, as one would that parses the body first."""
    real = jobs.overloaded

    def slow(*arguments: object) -> object:
        time.sleep(0.05)
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(jobs, "overloaded", slow)
    config = EngineConfig(
        model_path=SHOP,
        sid_vocab_file=SHOP / "items.tsv",
        device="cpu",
        kv_pool_tokens=16384,
        max_beam_width=32,
        invariance_check=False,
    )
    scheduler = Scheduler(Engine(config))
    scheduler.start()
    with running(scheduler, ServerConfig(port=0, max_in_flight=SETTINGS.places)) as server:
        checks = run(context(tmp_path, f"http://127.0.0.1:{server.port}"), SETTINGS)
    assert {check.name: check.outcome for check in checks}["refusals are quick"] is Outcome.FAIL
