"""Every planted fault turns the suite red where it should, and the ledger names its cause; without it all is green."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType

import pytest
from random_shop import CPU_AXES, MakeTask

from flashrec.errors import ConfigError
from flashrec_harness.children import package_path
from flashrec_harness.determinism.axes import AXES
from flashrec_harness.determinism.judge import judge
from flashrec_harness.determinism.suite import run_processes
from flashrec_harness.determinism.worker import perform
from flashrec_harness.outcome import Check, Outcome, SuiteContext, worst
from flashrec_harness.planting import PLANT_VARIABLE

SHOWN_IN_ONE_PROCESS = (
    "allow-list-ignored",
    "answers-swapped",
    "decode-position-by-bucket",
    "duplicated-beam",
    "early-page-reuse",
    "eviction-ignores-readers",
    "filters-of-the-first",
    "fp8-product-by-rows",
    "id-keyed-cache",
    "last-catalog-for-all",
    "noise-by-row",
    "page-leak-on-cancel",
    "parents-off-by-one",
    "positions-restart-in-chunk",
    "rope-off-by-one-after-hit",
    "split-count-from-batch",
    "stale-context-length",
    "stale-padding-rows",
    "truncated-page-key",
    "unseeded-tie-break",
    "wrong-page-tag",
)
SHOWN_BETWEEN_PROCESSES = ("hash-ordered-ties",)
LEDGERS = "ledgers agree where outputs do"


def failed(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks if check.outcome is Outcome.FAIL}


def named(axis: str, checks: list[Check]) -> list[str]:
    """Names of the checks that judge ``axis``."""
    if axis == "ledger":
        return [LEDGERS]
    if axis == "mixed":
        return [check.name for check in checks if "mixed waves" in check.name]
    return [AXES[axis].title]


def test_every_fault_is_in_the_matrix(faults: ModuleType) -> None:
    ours = {name for name, fault in faults.FAULTS.items() if fault.axis}
    assert ours == {*SHOWN_IN_ONE_PROCESS, *SHOWN_BETWEEN_PROCESSES}


def test_a_clean_engine_is_green(make_task: MakeTask) -> None:
    task = make_task(*CPU_AXES, runs=6)
    checks = judge([perform(task)], [task])
    assert not failed(checks)
    # One process of six waves is not enough for the line over processes, and says so.
    assert [check.name for check in checks if check.outcome is Outcome.INVALID] == named("mixed", checks)


@pytest.mark.parametrize("name", SHOWN_IN_ONE_PROCESS)
def test_the_fault_is_caught(name: str, faults: ModuleType, make_task: MakeTask) -> None:
    fault = faults.FAULTS[name]
    task = make_task("mixed" if fault.axis == "ledger" else fault.axis)
    with faults.plant(name):
        checks = judge([perform(task)], [task])
    red = failed(checks)
    (expected,) = named(fault.axis, checks)
    assert expected in red
    assert red[expected].reason
    if fault.tensor:
        causes = [row["cause"] for row in red[expected].rows]
        assert any(f"tensor {fault.tensor} " in cause for cause in causes), causes
        assert all("step " in cause and "request " in cause for cause in causes if "tensor" in cause)


def test_what_depends_on_the_hash_seed_shows_between_processes(
    faults: ModuleType, make_task: MakeTask, context: SuiteContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of the suite's hash seeds give this fault's string hashes of different parity."""
    tasks = [make_task("ties", process=process) for process in (0, 2)]
    monkeypatch.setenv(PLANT_VARIABLE, "hash-ordered-ties")
    reports = run_processes(tasks, context.out_dir)
    assert set(failed(judge(reports, tasks))) == set(named("ties", []))
    for report, task in zip(reports, tasks, strict=True):
        assert not failed(judge([report], [task]))


def test_faults_cannot_be_imported_in_a_normal_run() -> None:
    environment = {key: value for key, value in os.environ.items() if key != PLANT_VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", "import flashrec_harness.faults"],
        env={**environment, "PYTHONPATH": package_path()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert f"name a fault in {PLANT_VARIABLE}" in done.stderr


def test_a_fault_must_be_known_and_named(faults: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no fault 'nonsense'"), faults.plant("nonsense"):
        pass
    monkeypatch.setenv(PLANT_VARIABLE, "early-page-reuse")
    with pytest.raises(ConfigError, match="does not name 'id-keyed-cache'"), faults.plant("id-keyed-cache"):
        pass


def test_a_fault_leaves_no_trace(faults: ModuleType, make_task: MakeTask) -> None:
    with faults.plant(*SHOWN_IN_ONE_PROCESS):
        pass
    task = make_task("mixed", "cache", runs=4)
    assert worst(check.outcome for check in judge([perform(task)], [task])) is not Outcome.FAIL
