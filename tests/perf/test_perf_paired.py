"""Pairs of processes: interleaved, as many as their spread asks for, with the error rates of the whole ladder."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from simulated_engine import SimulatedEngine, workload

from flashrec_harness import stats
from flashrec_harness.outcome import Check, Outcome, SuiteContext
from flashrec_harness.perf import against, paired
from flashrec_harness.perf.measure import ProcessResult
from flashrec_harness.perf.rounds import CellRounds
from flashrec_harness.perf.worker import Task
from flashrec_harness.perf.workload import Cell
from flashrec_harness.worktrees import Revision

PLAN = workload(cells=(Cell(n=10),))
CELL = PLAN.cells[0].name
OLD, NEW = Revision("a" * 40, "old"), Revision("b" * 40, "new")


class Machine:
    """Runs both sides; it slows down by ``drift`` per process, as a warming machine does."""

    def __init__(
        self, seed: int, slowdown: float, *, drift: float = 0.002, noise: float = 0.007, round_noise: float = 0.01
    ) -> None:
        self.engine = SimulatedEngine(seed=seed, session_sd=0.0, process_sd=noise, round_sd=round_noise)
        self.slowdown, self.drift = slowdown, drift
        self.order = ""

    def __call__(self, side: paired.Side, number: int) -> ProcessResult:
        self.order += side
        self.engine.slowdown = (self.slowdown if side == "B" else 1.0) * (1 + self.drift * number)
        context = SuiteContext(model_path=Path("m"))
        return ProcessResult.of(self.engine(Task.of("engine", context, PLAN), Path("p")))


def decide(machine: Machine) -> Check:
    (_, check) = against.judge(paired.measure_pairs(machine, PLAN), OLD, NEW, [])
    return check


def test_rounds_are_interleaved_abba() -> None:
    machine = Machine(1, 1.0)
    paired.measure_pairs(machine, PLAN)
    assert machine.order.startswith("ABBAABBAAB")


def test_equal_commits_are_not_called_slower_despite_the_drift() -> None:
    assert [decide(Machine(seed, 1.0)).outcome for seed in range(25)].count(Outcome.FAIL) == 0


def test_three_percent_slower_fails() -> None:
    found = [decide(Machine(seed, 1 / 0.97)) for seed in range(25)]
    assert [check.outcome for check in found].count(Outcome.FAIL) >= 24
    assert found[0].reason.startswith("slower: ")


def test_a_noisier_machine_gets_more_pairs() -> None:
    quiet, noisy = Machine(3, 1.0, noise=0.001, round_noise=0.001), Machine(3, 1.0, noise=0.012)
    assert paired.measure_pairs(quiet, PLAN).planned == 5
    pairs = paired.measure_pairs(noisy, PLAN)
    assert 5 < pairs.planned <= 20
    assert len(pairs.a) == len(pairs.b) == pairs.planned


def test_a_gain_inside_the_noise_advises_to_revert() -> None:
    check = decide(Machine(4, 0.999, noise=0.002))
    assert check.outcome is Outcome.PASS
    assert check.reason.startswith("within noise")
    assert "Revert" in check.reason


def test_a_speed_up_is_a_plain_pass() -> None:
    check = decide(Machine(5, 0.9))
    assert (check.outcome, check.reason, check.data["verdict"]) == (Outcome.PASS, "", "faster")


def test_a_machine_too_noisy_for_three_percent_says_so_and_does_not_decide() -> None:
    check = decide(Machine(6, 1.01, noise=0.06))
    assert check.outcome is Outcome.INCONCLUSIVE
    assert "more than the 3% aimed at" in check.summary
    assert "over 20 ABBA pairs" in check.summary


class Budget:
    """A clock on which a process takes ``process_s``, and what a budget of ``seconds`` has left."""

    def __init__(self, run: paired.RunSide, process_s: float, seconds: float) -> None:
        self.run, self.process_s, self.seconds = run, process_s, seconds
        self.now = 0.0
        self.told: list[str] = []

    def __call__(self, side: paired.Side, number: int) -> ProcessResult:
        self.now += self.process_s
        return self.run(side, number)

    def pairs(self) -> paired.Pairs:
        return paired.measure_pairs(
            self,
            PLAN,
            seconds_left=lambda: max(self.seconds - self.now, 0.0),
            clock=lambda: self.now,
            tell=self.told.append,
        )


@pytest.mark.parametrize(
    ("slowdown", "outcome"), [(1.0, Outcome.INCONCLUSIVE), (1.2, Outcome.FAIL)], ids=["equal", "slower"]
)
def test_a_time_budget_ends_the_pairs_and_is_no_pass(slowdown: float, outcome: Outcome) -> None:
    budget = Budget(Machine(6, slowdown, noise=0.03), process_s=30.0, seconds=600.0)
    pairs = budget.pairs()
    # 20 wanted, 10 would fill the 600 s; after 9 there are 60 s, and one and a quarter pairs take 75.
    assert (pairs.planned, len(pairs.a), len(pairs.b), budget.now) == (20, 9, 9, 540.0)
    (line,) = budget.told
    assert line.startswith("pair spread ")
    assert line.endswith(": 20 pairs, up to 15.0 min more")
    valid, cut, check = against.judge(pairs, OLD, NEW, [])
    assert valid.outcome is Outcome.PASS
    assert valid.summary.startswith(
        "9 of 20 planned ABBA pairs of fresh processes of old and new, the most that are run:"
    )
    assert (cut.outcome, cut.summary) == (Outcome.INCONCLUSIVE, "stopped after 9 of 20 ABBA pairs")
    assert check.outcome is outcome, "a slowdown that nine pairs show is one"
    assert "over 9 ABBA pairs" in check.summary


def test_a_budget_with_room_for_all_pairs_changes_nothing() -> None:
    pairs = Budget(Machine(6, 1.0, noise=0.03), process_s=1.0, seconds=3600.0).pairs()
    assert len(pairs.b) == pairs.planned == 20
    assert len(against.judge(pairs, OLD, NEW, [])) == 2


def test_a_budget_that_ends_within_the_first_five_pairs_is_not_asked() -> None:
    """The suite's own alarm ends it: fewer pairs decide nothing."""
    assert len(Budget(Machine(6, 1.0, noise=0.03), process_s=30.0, seconds=60.0).pairs().b) == stats.MIN_PAIRS


RECORDED = Path(__file__).parent / "h200_pairs.json"


def recorded(side: paired.Side, number: int) -> ProcessResult:
    """Process ``number`` of those that were measured on an H200."""
    told = json.loads(RECORDED.read_text(encoding="utf-8"))
    one = told["processes"][number]
    assert one["side"] == side
    latencies = [[ms for ms in waves for _ in range(told["requests_per_wave"])] for waves in one["wave_ms"]]
    machine = Machine(0, 1.0)
    result = machine(side, number)
    result.cells = {CELL: CellRounds(throughput=one["throughput"], latencies_ms=latencies, outputs="same")}
    return result


def test_the_noise_of_an_h200_asks_for_twenty_pairs_and_nine_of_them_say_what_they_cannot_see() -> None:
    """A commit against itself: medians repeat to 0.3 %, p99 (of 40 waves, the slowest) to 2 %."""
    budget = Budget(recorded, process_s=28.0, seconds=560.0)
    pairs = budget.pairs()
    assert (len(pairs.b), pairs.planned, pairs.widest) == (9, 20, (CELL, "p99_ms"))
    assert pairs.spread == pytest.approx(0.0271, abs=1e-4)
    valid, cut, check = against.judge(pairs, OLD, NEW, [])
    assert (valid.outcome, cut.outcome, check.outcome) == (Outcome.PASS, Outcome.INCONCLUSIVE, Outcome.PASS)
    rows = {row["metric"]: row for row in check.rows}
    assert {metric: row["verdict"] for metric, row in rows.items()} == dict.fromkeys(rows, "within noise")
    assert rows["throughput"]["change %"] == pytest.approx(-0.29, abs=0.01)
    # The smallest shift that Student's t with 8 degrees of freedom rejects in 95 of 100 tries, by trying: 20,000
    # samples of nine. Throughput's lies at the floor of 1 % and what the mean's own spread needs above it.
    draws = np.random.default_rng(0).standard_normal((20_000, 9))
    limit = scipy.stats.t.ppf(1 - 0.01 / 3 / 2, 8) * draws.std(axis=1, ddof=1) / 3
    shift = next(step for step in np.arange(0.0, 9.0, 0.02) if (draws.mean(axis=1) + step > limit).mean() >= 0.95)
    old, new = (np.log(pairs.values(side, (CELL, "p99_ms"))) for side in ("A", "B"))
    spread = float(np.std(new - old, ddof=1))
    assert rows["p99_ms"]["detectable %"] == pytest.approx(100 * math.expm1(shift * spread), abs=0.15)
    assert rows["throughput"]["detectable %"] == pytest.approx(1 + 1.645 * 0.24 / 3, abs=0.06)
    assert "a change below 1.1 % could be missed (p99_ms: 4.8 %), more than the 3% aimed at" in check.summary


def test_a_side_that_broke_a_rule_makes_the_measurement_invalid() -> None:
    machine = Machine(7, 1.0)
    pairs = paired.measure_pairs(machine, PLAN)
    assert against.judge(pairs, OLD, NEW, ["4711 python"])[0].outcome is Outcome.INVALID
    pairs.b[2].profiled = True
    valid, cell = against.judge(pairs, OLD, NEW, [])
    assert (valid.outcome, cell.outcome) == (Outcome.INVALID, Outcome.NOT_RUN)
    assert valid.reason.startswith("new: process")


def test_commits_that_answer_differently_are_said_to() -> None:
    pairs = paired.measure_pairs(Machine(8, 1.0), PLAN)
    assert "different results" not in against.judge(pairs, OLD, NEW, [])[1].summary
    for process in pairs.b:
        process.cells[CELL].outputs = "other"
    assert "different results" in against.judge(pairs, OLD, NEW, [])[1].summary


@dataclass
class Drawn(CellRounds):
    """Rounds whose process medians are given."""

    drawn: dict[str, float] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        return self.drawn


def process(throughput: float, p50_ms: float, p99_ms: float) -> ProcessResult:
    medians = {"throughput": throughput, "p50_ms": p50_ms, "p99_ms": p99_ms}
    rounds = Drawn(throughput=[throughput] * PLAN.rounds, drawn=medians)
    return ProcessResult({CELL: rounds}, {}, 1.0, False, 1.0, None, {}, 1)


def test_the_noisiest_metric_decides_how_many_pairs_are_run() -> None:
    """Throughput and p50 are steady; p99 scatters by 2 %, which takes more than five pairs."""
    draw = np.random.default_rng(0)

    def run(side: paired.Side, number: int) -> ProcessResult:
        return process(100.0 + 0.01 * number, 10.0, 30.0 * float(np.exp(draw.normal(0, 0.014))))

    pairs = paired.measure_pairs(run, PLAN)
    assert pairs.widest == (CELL, "p99_ms")
    assert pairs.planned > 5
    valid, _ = against.judge(pairs, OLD, NEW, [])
    assert f"the noisiest: {CELL} p99_ms" in valid.summary


def pair(effect: float, rng: np.random.Generator, pair_sd: float) -> tuple[ProcessResult, ProcessResult]:
    """A pair with a spread of ``pair_sd`` in each metric; they move together, as a busy machine moves them."""
    common = rng.normal(0, pair_sd * math.sqrt(0.8))
    times = np.exp(effect + common + rng.normal(0, pair_sd * math.sqrt(0.2), 3))
    return process(1.0, 1.0, 1.0), process(1 / times[0], times[1], times[2])


def one_side(
    drawn: list[tuple[ProcessResult, ProcessResult]],
    draw: Callable[[], tuple[ProcessResult, ProcessResult]],
    side: paired.Side,
    number: int,
) -> ProcessResult:
    if number % 2 == 0:
        drawn.append(draw())
    return drawn[-1]["AB".index(side)]


def ladder_rate(true_change: float, *, pair_sd: float, trials: int, outcome: Outcome) -> float:
    """How often the whole ladder (spread, number of pairs, Holm, floor) ends in ``outcome``."""
    rng, hits = np.random.default_rng(20261130), 0
    for _ in range(trials):
        drawn: list[tuple[ProcessResult, ProcessResult]] = []
        run = partial(one_side, drawn, lambda: pair(true_change, rng, pair_sd))
        _, check = against.judge(paired.measure_pairs(run, PLAN), OLD, NEW, [])
        hits += check.outcome is outcome
    return hits / trials


@pytest.mark.parametrize("pair_sd", [0.005, 0.01, 0.02])
def test_the_ladders_false_alarms_are_at_most_one_percent(pair_sd: float) -> None:
    """Three gated metrics together, the number of pairs chosen by the ladder itself."""
    assert ladder_rate(0.0, pair_sd=pair_sd, trials=1000, outcome=Outcome.FAIL) <= 0.01


@pytest.mark.parametrize("pair_sd", [0.005, 0.01, 0.02])
def test_the_ladder_finds_a_slowdown_of_three_percent_with_95_percent_power(pair_sd: float) -> None:
    assert ladder_rate(-math.log(0.97), pair_sd=pair_sd, trials=400, outcome=Outcome.FAIL) >= 0.95


def test_equal_commits_mostly_pass_at_a_pair_spread_of_one_percent() -> None:
    assert ladder_rate(0.0, pair_sd=0.01, trials=300, outcome=Outcome.PASS) >= 0.95


@pytest.mark.parametrize(
    ("p99", "throughput", "outcome", "named"),
    [
        ([0.7, 1.5, 2.5, 0.9, 4.0], 1.0, Outcome.INCONCLUSIVE, "inconclusive: p99_ms +"),
        ([0.7, 1.5, 2.5, 0.9, 4.0], 0.8, Outcome.FAIL, "slower: throughput -20.00 %"),
        ([0.7, 1.5, 2.5, 0.9, 4.0], 1.3, Outcome.INCONCLUSIVE, "inconclusive: p99_ms +"),
        ([1.0, 1.0, 1.0, 1.0, 1.0], 1.0, Outcome.PASS, "within noise"),
    ],
)
def test_a_cell_is_as_bad_as_its_gravest_metric(
    p99: list[float], throughput: float, outcome: Outcome, named: str
) -> None:
    pairs = paired.Pairs(PLAN)
    for number, slower in enumerate(p99):
        wobble = 1 + 1e-4 * (number % 2)
        pairs.a.append(process(1.0, 1.0, 1.0))
        pairs.b.append(process(throughput * wobble, wobble, slower))
    _, check = against.judge(pairs, OLD, NEW, [])
    assert check.outcome is outcome
    assert check.reason.startswith(named)


def test_the_verdict_survives_its_own_planted_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ladder that takes any difference for one, and one that never rejects, are told from the real one."""
    with monkeypatch.context() as patch:
        patch.setattr(stats, "paired_verdict", partial(stats.paired_verdict, floor=0.0))
        patch.setattr(stats, "holm", lambda p_values, alpha: dict.fromkeys(p_values, True))
        assert ladder_rate(0.0, pair_sd=0.01, trials=100, outcome=Outcome.FAIL) > 0.1
    with monkeypatch.context() as patch:
        patch.setattr(stats, "holm", lambda p_values, alpha: dict.fromkeys(p_values, False))
        assert ladder_rate(-math.log(0.97), pair_sd=0.01, trials=100, outcome=Outcome.FAIL) < 0.1


def test_task_survives_json() -> None:
    task = Task.of("engine", SuiteContext(model_path=Path("m"), sid_vocab_file=Path("c")), PLAN)
    assert Task(**asdict(task)).context().sid_vocab_file == Path("c")
