"""Overload: the arithmetic of its verdicts, and a server that keeps its goodput, or does not."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from server_support import running

from flashrec import Engine, EngineConfig
from flashrec.errors import ConfigError
from flashrec.runtime.scheduler import Scheduler
from flashrec.server import jobs
from flashrec.server.config import ServerConfig
from flashrec_harness.outcome import Outcome, SuiteContext
from flashrec_harness.overload import suite
from flashrec_harness.overload.cores import divide, kept_to
from flashrec_harness.overload.fleet import Load, Shot
from flashrec_harness.overload.judge import KEPT, interval, verdict
from flashrec_harness.overload.suite import OverloadSettings, Round, run

SHOP = Path("engine/flashrec/assets/tiny-shop")
SETTINGS = OverloadSettings(n=16, seconds=1.0, rounds=2, looks=1, places=24)


def context(directory: Path, url: str | None = None) -> SuiteContext:
    return SuiteContext(model_path=SHOP, sid_vocab_file=SHOP / "items.tsv", url=url, out_dir=directory)


def rounds(*ratios: float, factor: float = 4.0) -> list[Round]:
    return [Round(100.0, 100 * factor, 100 * ratio, 100.0) for ratio in ratios]


@pytest.mark.parametrize(
    ("ratios", "outcome"),
    [
        ((1.0, 0.97, 0.99), Outcome.PASS),
        ((0.5, 0.52, 0.51), Outcome.FAIL),
        ((0.88, 0.97, 1.06), Outcome.INCONCLUSIVE),  # above by its median: not enough
        ((0.7, 1.2, 1.9), Outcome.INCONCLUSIVE),
    ],
)
def test_goodput_is_judged_by_its_interval(ratios: tuple[float, ...], outcome: Outcome) -> None:
    found = suite._goodput(rounds(*ratios), OverloadSettings(rounds=3))
    assert found.outcome is outcome
    assert ("--rounds" in found.reason) is (outcome is Outcome.INCONCLUSIVE)


def test_the_interval_is_student_s() -> None:
    """By hand: logs 0 and 0.2, mean 0.1, standard error 0.1; t quantiles 12.706 of one look and 25.452 of two."""
    ratios = [1.0, 1.2214027581601699]
    assert interval(ratios, 1) == pytest.approx((0.31013, 3.93833), rel=1e-3)
    assert interval(ratios, 2) == pytest.approx((math.exp(0.1 - 2.5452), math.exp(0.1 + 2.5452)), rel=1e-3)


def share_decided(outcome: Outcome, mean: float, *, looks: int, corrected: bool) -> float:
    """Of 2,000 simulated servers whose rounds scatter by 5 %, how many a run of at most ``looks`` looks calls so."""
    draw, count = np.random.default_rng(0), 2000
    decided = 0
    for _ in range(count):
        ratios = np.exp(draw.normal(math.log(mean), 0.05, 5 * looks)).tolist()
        found = Outcome.INCONCLUSIVE
        for look in range(1, looks + 1):
            seen = ratios[: 5 * look]
            found = verdict(seen, seen, looks if corrected else 1)
            if found is not Outcome.INCONCLUSIVE:
                break
        decided += found is outcome
    return decided / count


def test_repeated_looks_keep_the_error_rate() -> None:
    """At exactly 0.9 a pass and a fail are wrong at most 2.5 % of the time each; uncorrected looks are not."""
    for outcome in (Outcome.PASS, Outcome.FAIL):
        assert share_decided(outcome, KEPT, looks=4, corrected=True) <= 0.025
        assert share_decided(outcome, KEPT, looks=4, corrected=False) > 0.04


def test_more_looks_decide_what_is_near() -> None:
    """5 % above the limit, most runs pass within four looks; hardly any with the first alone."""
    assert share_decided(Outcome.PASS, 0.945, looks=4, corrected=True) > 0.8
    assert share_decided(Outcome.FAIL, 0.855, looks=4, corrected=True) > 0.8
    assert share_decided(Outcome.INCONCLUSIVE, KEPT, looks=4, corrected=True) > 0.9


class Rates:
    """A fleet that measures what it is told: capacities of 100, and goodputs of ``ratios`` in turn."""

    def __init__(self, *ratios: float) -> None:
        self.overloads, self._ratios = 0, ratios

    def load(self, requests: int, concurrency: int, rate: float | None = None, seed: int = 0) -> Load:
        per_second = 100.0
        if rate is not None:
            per_second = 100 * self._ratios[self.overloads % len(self._ratios)]
            self.overloads += 1
        return Load([Shot(200, 0.0, index / per_second) for index in range(requests)], 0.2 if rate is None else 0.3)


@pytest.mark.parametrize(
    ("ratios", "sent", "outcome"),
    [
        ((1.0, 0.99, 1.01), 3, Outcome.PASS),
        ((0.7, 0.71, 0.69), 3, Outcome.FAIL),
        ((0.86, 0.9, 0.94), 9, Outcome.INCONCLUSIVE),
        ((0.92, 0.97, 1.02), 6, Outcome.PASS),
    ],
)
def test_rounds_are_added_until_a_look_decides(ratios: tuple[float, ...], sent: int, outcome: Outcome) -> None:
    rates, settings = Rates(*ratios), OverloadSettings(rounds=3, looks=3)
    found, *_ = suite._rounds(rates, 10, settings, 0)  # type: ignore[arg-type]
    assert rates.overloads == len(found) == sent
    assert suite._goodput(found, settings).outcome is outcome


@pytest.mark.parametrize(
    ("ratios", "shared", "outcome"),
    [
        ((0.85, 0.86, 0.84), False, Outcome.FAIL),
        ((0.85, 0.86, 0.84), True, Outcome.INCONCLUSIVE),  # 0.944 without the tenth of a core that the clients took
        ((0.75, 0.76, 0.74), True, Outcome.FAIL),  # 0.833
        ((0.95, 0.96, 0.94), True, Outcome.PASS),
    ],
)
def test_a_server_is_not_blamed_for_what_its_clients_take(
    ratios: tuple[float, ...], shared: bool, outcome: Outcome
) -> None:
    settings = OverloadSettings(rounds=3, looks=1)
    found, *_ = suite._rounds(Rates(*ratios), 10, settings, 0, shared=shared)  # type: ignore[arg-type]
    assert [one.taken for one in found] == pytest.approx([0.1 * shared] * 3)
    assert found[0].ratio_at_most == pytest.approx(ratios[0] / (1 - 0.1 * shared))
    check = suite._goodput(found, settings)
    assert check.outcome is outcome
    assert ("had its clients not taken 0.10 of its cores" in check.reason) is (shared and outcome is not Outcome.PASS)


def test_no_round_shares_a_capacity_with_another() -> None:
    """Rounds that share one are not independent, and their interval is too narrow."""
    measured = iter(range(1, 100))

    class Counting(Rates):
        def load(self, requests: int, concurrency: int, rate: float | None = None, seed: int = 0) -> Load:
            load = super().load(requests, concurrency, rate, seed)
            pace = next(measured)
            return load if rate is not None else Load([Shot(200, 0.0, shot.end / pace) for shot in load.shots], 0.2)

    found, *_ = suite._rounds(Counting(1.0), 10, OverloadSettings(rounds=3, looks=1), 0)  # type: ignore[arg-type]
    capacities = [value for one in found for value in (one.capacity_before, one.capacity_after)]
    assert len({round(value) for value in capacities}) == 6


def test_cores_are_divided_where_there_are_enough() -> None:
    assert not divide(frozenset({0, 1, 2})).divided
    for count, clients in ((4, 1), (7, 1), (16, 4)):
        found = divide(frozenset(range(count)))
        assert (len(found.clients), len(found.server)) == (clients, count - clients)
        assert not found.clients & found.server
    assert str(divide(frozenset(range(8)))) == "server on 6 cores, clients on 2 others"


def test_what_is_started_keeps_to_its_cores() -> None:
    mine = os.sched_getaffinity(0)
    one = frozenset({min(mine)})
    show = [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]
    with kept_to(one):
        assert subprocess.check_output(show, text=True).strip() == str(sorted(one))
    assert os.sched_getaffinity(0) == mine


def test_settings_that_cannot_be_judged_are_refused() -> None:
    for wrong in ({"rounds": 1}, {"looks": 0}):
        with pytest.raises(ConfigError, match="rounds, looks"):
            OverloadSettings(**wrong)


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


@pytest.mark.alone
@pytest.mark.slow
def test_goodput_does_not_collapse_at_four_times_the_capacity(tmp_path: Path) -> None:
    """Ratios only: the machine's speed does not matter, and most of what it does to both sides cancels.

    Two rounds seldom decide about 0.9, but they may not speak against it, and a collapse shows in each of them.
    """
    found = {check.name: check for check in run(context(tmp_path), SETTINGS)}
    goodput = found.pop("goodput at 4 times the capacity")
    assert goodput.outcome in (Outcome.PASS, Outcome.INCONCLUSIVE), f"{goodput.reason}; {goodput.summary}"
    assert min(goodput.data["ratios"]) > 0.5, goodput.summary
    for check in found.values():
        assert check.outcome is Outcome.PASS, f"{check.name}: {check.reason}; {check.summary}"


@pytest.mark.alone
@pytest.mark.slow
def test_refusals_that_cost_as_much_as_an_answer_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: each refusal holds up the event loop, as one would that parses the body first."""
    real = vars(jobs)["overloaded"]

    def slow(*arguments: object) -> object:
        time.sleep(0.05)
        return real(*arguments)

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
