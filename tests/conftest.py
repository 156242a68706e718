"""The order of the test files, and the planted faults for every suite's negative controls."""

from __future__ import annotations

from types import ModuleType

import pytest

from flashrec_harness.planting import PLANT_VARIABLE


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: of several workers, all but one would wait for a slow file begun last."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The package of planted faults, which the environment must name."""
    monkeypatch.setenv(PLANT_VARIABLE, "any")
    import flashrec_harness.faults as package

    monkeypatch.setenv(PLANT_VARIABLE, ",".join(package.FAULTS))
    return package
