"""The registered faults that a trace must show: a cut one for real, the others as a GPU's trace would look."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from trace_maker import LAYERS, TraceMaker, write

from flashrec.profiler import ProfileOptions, Profiler, trace_range
from flashrec_harness.outcome import Outcome
from flashrec_harness.tracing.checks import Expectation, judge_file

ON_A_GPU = {
    "eager-decode": {"eager": True},
    "bf16-under-fp8": {"bf16": True},
    "sync-in-decode": {"sync": True},
    "allocation-per-step": {"allocate": True},
}


def recorded(directory: Path) -> Path:
    profiler = Profiler()
    profiler.start(ProfileOptions(output_dir=directory, profile_prefix="real"))
    for name in ("flashrec.prefill", "flashrec.decode", "flashrec.finalize"):
        with trace_range(name):
            torch.ones(20, 20) @ torch.ones(20, 20)
    profiler.stop()
    assert profiler.wait(60)
    (path,) = directory.glob("real*.trace.json.gz")
    return path


def test_every_trace_fault_is_tried_here(faults: ModuleType) -> None:
    named = {f.name for f in faults.FAULTS.values() for catch in f.catches if catch.suite == "trace"}
    assert named == {*ON_A_GPU, "corrupted-trace"}


def test_a_corrupted_trace_is_invalid(faults: ModuleType, tmp_path: Path) -> None:
    with faults.plant("corrupted-trace"):
        path = recorded(tmp_path / "cut")
    (check,) = judge_file(path, Expectation(server=False))
    assert check.outcome is Outcome.INVALID
    assert judge_file(recorded(tmp_path / "whole"), Expectation(server=False))[0].outcome is Outcome.PASS


@pytest.mark.parametrize("name", ON_A_GPU)
def test_what_the_fault_does_to_a_gpus_trace_is_caught(name: str, faults: ModuleType, tmp_path: Path) -> None:
    (catch,) = faults.FAULTS[name].catches
    assert catch.gpu
    with faults.plant(name):  # without a GPU it finds nothing to spoil, and must come and go all the same
        path = write(tmp_path, TraceMaker(**ON_A_GPU[name]).build())
    checks = judge_file(path, Expectation(fp8_gemms_per_forward=4 * LAYERS))
    assert [check.name for check in checks if check.outcome is not Outcome.PASS] == [catch.check]
    assert {check.outcome for check in checks if check.name == catch.check} == {catch.outcome}
