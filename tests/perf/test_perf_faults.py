"""The registered faults of timing: seen on a simulated clock, where a busy machine's noise cannot hide them."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from torch.autograd import profiler as autograd_profiler

from flashrec_harness.outcome import Outcome
from flashrec_harness.perf import profiled
from flashrec_harness.planting import PLANT_VARIABLE

SIMULATED = {"slowdown": "slower", "edited-baseline": "the file was edited"}


@pytest.fixture
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgets afterwards that a profiler ran in this process."""
    monkeypatch.setattr(autograd_profiler, "_run_on_profiler_start", autograd_profiler._run_on_profiler_start)
    monkeypatch.setattr(profiled, "_seen", [])


def test_every_perf_fault_is_tried_here(faults: ModuleType) -> None:
    named = {f.name for f in faults.FAULTS.values() for catch in f.catches if catch.suite == "perf"}
    assert named == {*SIMULATED, "profiled-process"}


@pytest.mark.slow
@pytest.mark.usefixtures("unwatched")
@pytest.mark.parametrize("name", SIMULATED)
def test_the_fault_is_caught_and_the_session_before_it_was_clean(
    name: str, faults: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashrec_harness.faults import simulated

    (catch,) = faults.FAULTS[name].catches
    monkeypatch.setenv(PLANT_VARIABLE, name)
    checks = simulated.run(tmp_path)
    red = [check for check in checks if check.outcome is not Outcome.PASS]
    assert [check.outcome for check in red] == [catch.outcome]
    assert red[0].name.startswith(catch.check)
    assert SIMULATED[name] in red[0].reason


@pytest.mark.usefixtures("unwatched")
def test_a_profiled_process_says_so(faults: ModuleType) -> None:
    with faults.plant("profiled-process"):
        profiled.watch()
    assert profiled.ever()
