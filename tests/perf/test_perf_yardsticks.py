"""What is timed beside the judged engine, and the ratios that come of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from simulated_engine import SimulatedEngine, workload

from flashrec_harness.outcome import SuiteContext
from flashrec_harness.perf import judge
from flashrec_harness.perf.measure import measure, yardsticks_of
from flashrec_harness.perf.subjects import HttpSubject
from flashrec_harness.perf.worker import Task
from flashrec_harness.perf.workload import Cell
from flashrec_harness.sglang_env import URL_VARIABLE

SGLANG = "http://127.0.0.1:30000"


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SuiteContext:
    monkeypatch.delenv(URL_VARIABLE, raising=False)
    return SuiteContext(model_path=tmp_path, sid_vocab_file=tmp_path / "items.tsv", out_dir=tmp_path)


def test_sglang_is_a_yardstick_where_a_server_of_it_is_named(
    context: SuiteContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = workload(reference_requests=2)
    assert yardsticks_of(context, plan) == ["transformers"]
    assert yardsticks_of(replace(context, sid_vocab_file=None), plan) == []
    monkeypatch.setenv(URL_VARIABLE, SGLANG)
    assert yardsticks_of(context, plan) == ["transformers", "sglang"]
    assert yardsticks_of(replace(context, sid_vocab_file=None), plan) == ["sglang"]
    assert yardsticks_of(replace(context, url=SGLANG), plan) == ["transformers"]  # it is judged itself
    assert yardsticks_of(context, workload(reference_requests=0)) == []


def test_each_yardstick_has_its_own_ratio(context: SuiteContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated engine takes 20 ms a batch without noise; SGLang here three times, ``transformers`` eight times as
    long."""
    monkeypatch.setenv(URL_VARIABLE, SGLANG)
    engine = SimulatedEngine(seed=0, session_sd=0.0, process_sd=0.0, round_sd=0.0)
    order: list[str] = []

    def run(task: Task, prefix: Path) -> Mapping[str, Any]:
        order.append(task.subject)
        assert (task.url == SGLANG) is (task.subject == "sglang")
        engine.slowdown = {"sglang": 3.0, "transformers": 8.0}.get(task.subject, 1.0)
        return engine(task, prefix)

    plan = workload(reference_requests=4)
    found = measure(context, plan, yardsticks=yardsticks_of(context, plan), run=run)
    assert order == ["engine", "transformers", "sglang", "engine", "engine"]
    session = found.session(run_id="run", commit="c", boot_id="b")
    for cell in plan.cells:
        samples = session.samples[cell.name]
        assert samples["ratio"] == pytest.approx([8.0] * 3)
        assert samples["sglang_ratio"] == pytest.approx([3.0] * 3)
        said = judge.figures(cell, found, session).summary
        assert "8x transformers in the same run; 3x SGLang in the same run" in said


def test_a_yardstick_s_rounds_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dialect:
        has_catalog = False

    monkeypatch.setattr("flashrec_harness.perf.subjects.dialect_of", lambda url: Dialect())
    cell = Cell(n=4, requests=50)
    assert HttpSubject(SGLANG, 3).round_size(cell) == 50
    assert HttpSubject(SGLANG, 3, requests=2).round_size(cell) == 2
