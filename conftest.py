"""Loads the harness's pytest plugin in a checkout that is used without being installed."""

from __future__ import annotations

from importlib.metadata import entry_points

if not any(point.value == "flashrec_harness.plugin" for point in entry_points(group="pytest11")):
    pytest_plugins = ["flashrec_harness.plugin"]
