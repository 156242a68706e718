"""The planted faults, for every suite's negative controls."""

from __future__ import annotations

from types import ModuleType

import pytest

from flashrec_harness.planting import PLANT_VARIABLE


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The package of planted faults, which the environment must name."""
    monkeypatch.setenv(PLANT_VARIABLE, "any")
    import flashrec_harness.faults as package

    monkeypatch.setenv(PLANT_VARIABLE, ",".join(package.FAULTS))
    return package
