"""Time budgets: whatever a suite is doing when its minutes are over, it ends, and it ends inconclusive."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flashrec_harness import budget, cli, runner
from flashrec_harness.children import run_module
from flashrec_harness.outcome import Check, Outcome, SuiteContext
from flashrec_harness.report import model

SECOND = 1 / 60


def busy(context: SuiteContext) -> None:
    while True:
        sum(range(1000))


def asleep(context: SuiteContext) -> None:
    time.sleep(60)


def swallowing(context: SuiteContext) -> None:
    while True:
        try:
            time.sleep(60)
        except Exception:
            continue


def waiting_for_a_child(context: SuiteContext) -> None:
    sleeper(context.out_dir / "child.log")


def waiting_for_threads_with_children(context: SuiteContext) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(sleeper, [context.out_dir / "a.log", context.out_dir / "b.log"]))


def sleeper(log: Path) -> None:
    run_module("timeit", ["-n", "1", "-r", "1", "-s", "import time", "time.sleep(60)"], log=log, timeout_s=100)


@pytest.mark.parametrize("work", [busy, asleep, swallowing, waiting_for_a_child, waiting_for_threads_with_children])
def test_a_suite_out_of_budget_is_inconclusive(tmp_path: Path, work: Callable[[SuiteContext], None]) -> None:
    def suite(context: SuiteContext) -> list[Check]:
        work(context)
        return [Check("perf", "never", Outcome.PASS, "")]

    started = time.monotonic()
    (check,) = runner.guarded("perf", SuiteContext(model_path=tmp_path, out_dir=tmp_path), suite, SECOND)
    assert time.monotonic() - started < 20
    assert (check.name, check.outcome) == ("time budget", Outcome.INCONCLUSIVE)
    assert "the time budget of 0.0166667 min is over" in check.reason


def test_a_suite_within_its_budget_keeps_its_verdict_and_leaves_no_alarm(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGALRM)

    def suite(context: SuiteContext) -> list[Check]:
        left = budget.seconds_left()
        assert left is not None
        assert 0 < left <= 60
        return [Check("perf", "quick", Outcome.PASS, "")]

    (check,) = runner.guarded("perf", SuiteContext(model_path=tmp_path, out_dir=tmp_path), suite, 1.0)
    assert check.outcome is Outcome.PASS
    assert budget.seconds_left() is None
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is before


def test_the_command_line_ends_inconclusive_and_the_next_suite_has_its_own_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()

    def suite(name: str) -> object:
        return (lambda context: asleep(context)) if name == "kernel" else lambda context: [passed(name)]

    def passed(name: str) -> Check:
        return Check(name, "check", Outcome.PASS, "")

    monkeypatch.setattr(runner, "suite_function", suite)
    monkeypatch.setattr("flashrec_harness.acceptance.unit_tests", suite("unit"))
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["accept", "--model-path", "model", "--budget", "0.01"])
    assert exit_info.value.code == 4
    report = model.load(Path("reports/latest"))
    outcomes = {name: checks[0].outcome for name, checks in report.suites.items()}
    assert outcomes.pop("kernel") is Outcome.INCONCLUSIVE
    assert set(outcomes.values()) == {Outcome.PASS}
    assert report.headline.startswith("INCONCLUSIVE: 1 of ")


def test_without_a_budget_nothing_is_limited() -> None:
    with budget.within(None):
        assert budget.seconds_left() is None
        budget.check()
