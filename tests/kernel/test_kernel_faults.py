"""The registered kernel faults turn the suite red, and only where they are planted."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from flashrec.errors import ConfigError
from flashrec.kernels._triton import MODE, TritonMode
from flashrec_harness import kernels_suite
from flashrec_harness.outcome import Outcome, SuiteContext

KERNEL_FAULTS = ("scale-dropped", "weight-scale-dropped", "wrong-last-block", "zeros-kernel")


def judged(only: str) -> list[Outcome]:
    checks = kernels_suite.run(SuiteContext(model_path=Path(), quick=True, only=only))
    return [check.outcome for check in checks if check.name.startswith(f"{only} (")]


def test_every_kernel_fault_is_tried_here(faults: ModuleType) -> None:
    named = {f.name for f in faults.FAULTS.values() for catch in f.catches if catch.suite == "kernel"}
    assert named == set(KERNEL_FAULTS)


@pytest.mark.skipif(MODE is TritonMode.ABSENT, reason="Triton is not installed")
@pytest.mark.parametrize("name", KERNEL_FAULTS)
def test_the_fault_is_caught(name: str, faults: ModuleType) -> None:
    (catch,) = faults.FAULTS[name].catches
    with faults.plant(name):
        assert Outcome.FAIL in judged(catch.only)
    assert Outcome.FAIL not in judged(catch.only)


def test_an_unknown_kernel_is_a_usage_error() -> None:
    with pytest.raises(ConfigError, match="--only nonsense: no such kernel; there are rms_norm"):
        judged("nonsense")
