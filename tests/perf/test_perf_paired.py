"""Paired ABBA rounds on a simulated machine that drifts."""

from __future__ import annotations

import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest
from simulated_engine import SimulatedEngine, workload

from flashrec.errors import ConfigError
from flashrec_harness.outcome import Outcome, SuiteContext
from flashrec_harness.perf import paired
from flashrec_harness.perf.measure import ProcessResult
from flashrec_harness.perf.worker import Task
from flashrec_harness.perf.workload import Cell

PLAN = workload(cells=(Cell(n=10),))
CELL = PLAN.cells[0].name


class Machine:
    """Runs both sides; it slows down by ``drift`` per process, as a warming machine does."""

    def __init__(self, seed: int, slowdown: float, *, drift: float = 0.002, noise: float = 0.007) -> None:
        self.engine = SimulatedEngine(seed=seed, session_sd=0.0, process_sd=noise)
        self.slowdown, self.drift = slowdown, drift
        self.order = ""

    def __call__(self, side: paired.Side, number: int) -> ProcessResult:
        self.order += side
        self.engine.slowdown = (self.slowdown if side == "B" else 1.0) * (1 + self.drift * number)
        context = SuiteContext(model_path=Path("m"))
        return ProcessResult.of(self.engine(Task.of("engine", context, PLAN), Path("p")))


def decide(machine: Machine) -> Outcome:
    return paired.judge(paired.measure_pairs(machine, PLAN), CELL, "HEAD~1").outcome


def test_rounds_are_interleaved_abba() -> None:
    machine = Machine(1, 1.0)
    paired.measure_pairs(machine, PLAN)
    assert machine.order.startswith("ABBAABBAAB")


def test_equal_commits_are_not_called_slower_despite_the_drift() -> None:
    assert [decide(Machine(seed, 1.0)) for seed in range(25)].count(Outcome.FAIL) == 0


def test_three_percent_slower_fails() -> None:
    assert [decide(Machine(seed, 1 / 0.97)) for seed in range(25)].count(Outcome.FAIL) >= 24


def test_a_noisier_machine_gets_more_pairs() -> None:
    quiet, noisy = Machine(3, 1.0, noise=0.002), Machine(3, 1.0, noise=0.012)
    assert paired.measure_pairs(quiet, PLAN).count == 5
    assert 5 < paired.measure_pairs(noisy, PLAN).count <= 20


def test_a_gain_inside_the_noise_advises_to_revert() -> None:
    check = paired.judge(paired.measure_pairs(Machine(4, 0.999, noise=0.002), PLAN), CELL, "HEAD~1")
    assert check.outcome is Outcome.PASS
    assert "revert it" in check.reason


def test_a_speed_up_is_a_plain_pass() -> None:
    check = paired.judge(paired.measure_pairs(Machine(5, 0.9), PLAN), CELL, "HEAD~1")
    assert (check.outcome, check.reason) == (Outcome.PASS, "")
    assert "detectable" in check.summary


def test_checkout_of_an_unknown_revision_is_a_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="--against nowhere"), paired.checkout("nowhere"):
        pass


def test_task_survives_json() -> None:
    task = Task.of("engine", SuiteContext(model_path=Path("m"), sid_vocab_file=Path("c")), PLAN)
    assert Task(**asdict(task)).context().sid_vocab_file == Path("c")
