"""``results.json`` holds the whole report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from report_samples import report

from flashrec_harness.environment import Commit
from flashrec_harness.outcome import Check, Outcome
from flashrec_harness.report import model


def test_json_round_trip_keeps_everything() -> None:
    first = report()
    first.suites = dict(reversed(first.suites.items()))
    again = model.from_json(model.to_json(first))
    assert again == first
    assert list(again.suites) == ["perf", "parity"], "suites keep the order they ran in"


def test_a_tables_columns_keep_their_order() -> None:
    check = Check("parity", "c", Outcome.PASS, "s", rows=[{"n": 4, "lists": 2, "equal": 2}])
    loaded = model.from_json(model.to_json(report({"parity": [check]})))
    assert list(loaded.suites["parity"][0].rows[0]) == ["n", "lists", "equal"]


def test_json_takes_paths_numpy_and_sets() -> None:
    values = {"path": Path("a/b"), "array": np.arange(3), "set": {2, 1}, 7: "key"}
    check = Check("perf", "c", Outcome.PASS, "s", data=values)
    loaded = model.from_json(model.to_json(report({"perf": [check]})))
    expected = {"path": "a/b", "array": [0, 1, 2], "set": [1, 2], "7": "key"}
    assert loaded.suites["perf"][0].data == expected


def test_json_refuses_what_it_cannot_hold() -> None:
    check = Check("perf", "c", Outcome.PASS, "s", data={"x": object()})
    with pytest.raises(TypeError):
        model.to_json(report({"perf": [check]}))


def test_another_schema_is_refused() -> None:
    text = model.to_json(report()).replace(b'"schema": 1', b'"schema": 99')
    with pytest.raises(ValueError, match="schema 99, this harness reads 1"):
        model.from_json(text)


def test_acceptance_lines_are_the_verdict_where_there_are_any() -> None:
    accepted = report()
    assert accepted.outcome is Outcome.FAIL
    accepted.lines = [Check("accept", "line", Outcome.NOT_RUN, "")]
    assert accepted.outcome is Outcome.NOT_RUN
    assert accepted.headline == "INCOMPLETE: 1 of 1 not run"


def test_one_suite_has_its_own_verdict() -> None:
    assert report().only("perf").outcome is Outcome.INVALID


def test_run_ids_sort_by_time_and_name_the_commit() -> None:
    started = report().started
    first = model.new_run_id(Commit("1a2b3c4d5e6f7", True), now=started)
    assert first == "20261129-194200-1a2b3c4d5+dirty"
    assert first < model.new_run_id(Commit("", False), now=started.replace(minute=43))
    assert model.new_run_id(replace(Commit("", False)), now=started) == "20261129-194200-no-commit"
