"""The perf suite on a simulated clock: equal engines pass, slow ones fail, unlike ones are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from simulated_engine import SimulatedEngine, workload

from flashrec_harness import baselines, stats
from flashrec_harness.baselines import Baseline
from flashrec_harness.environment import Commit
from flashrec_harness.outcome import Check, Outcome, SuiteContext
from flashrec_harness.perf import judge, suite
from flashrec_harness.perf.measure import Measurement, ProcessResult, measure
from flashrec_harness.perf.workload import Workload

COMMIT = Commit("c0ffee" * 6, False)


def context(tmp_path: Path, run: str = "run") -> SuiteContext:
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    return SuiteContext(model_path=model, out_dir=tmp_path / "reports" / run / "perf")


def measured(engine: SimulatedEngine, tmp_path: Path, plan: Workload | None = None) -> Measurement:
    engine.new_session()
    return measure(context(tmp_path), plan or workload(), run=engine)


def stored_baseline(engine: SimulatedEngine, tmp_path: Path, sessions: int = 3) -> Baseline:
    kept = [
        measured(engine, tmp_path).session(run_id=f"run-{i}", commit=COMMIT.sha, boot_id="b") for i in range(sessions)
    ]
    return Baseline("simulated", {}, {}, {}, kept)


def verdicts(engine: SimulatedEngine, baseline: Baseline, tmp_path: Path) -> list[Check]:
    session = measured(engine, tmp_path).session(run_id="now", commit="x", boot_id="b")
    return judge.against_baseline(session, baseline, [])


def test_an_engine_against_itself_passes(tmp_path: Path) -> None:
    """A/A: 40 sessions against their own baseline; the simulation's rate of alarms is below 3 %."""
    engine = SimulatedEngine(seed=1)
    baseline = stored_baseline(engine, tmp_path)
    found = [check.outcome for _ in range(40) for check in verdicts(engine, baseline, tmp_path)]
    assert found.count(Outcome.FAIL) <= 1
    assert found.count(Outcome.PASS) >= 70


@pytest.mark.parametrize("noise", [1.0, 3.0])
def test_an_injected_slowdown_of_five_percent_or_three_bands_fails(tmp_path: Path, noise: float) -> None:
    engine = SimulatedEngine(seed=2, session_sd=0.003 * noise, process_sd=0.004 * noise)
    baseline = stored_baseline(engine, tmp_path)
    band = max(
        stats.band(baseline.spread(cell, metric), 3) for cell in baseline.cells for metric in ("throughput", "p50_ms")
    )
    engine.slowdown = max(1.05, float(1 + 3 * band))
    for _ in range(10):
        checks = verdicts(engine, baseline, tmp_path)
        assert [check.outcome for check in checks] == [Outcome.FAIL, Outcome.FAIL]
        assert "slower" in checks[0].reason


def test_a_speed_up_passes_and_is_named(tmp_path: Path) -> None:
    engine = SimulatedEngine(seed=3)
    baseline = stored_baseline(engine, tmp_path)
    engine.slowdown = 0.9
    checks = verdicts(engine, baseline, tmp_path)
    assert {check.outcome for check in checks} == {Outcome.PASS}
    assert checks[0].rows[0]["verdict"] == "faster"


def test_across_a_soft_difference_a_slowdown_is_inconclusive(tmp_path: Path) -> None:
    engine = SimulatedEngine(seed=4)
    baseline = stored_baseline(engine, tmp_path)
    engine.slowdown = 1.2
    session = measured(engine, tmp_path).session(run_id="now", commit="x", boot_id="b")
    checks = judge.against_baseline(session, baseline, ["driver"])
    assert {check.outcome for check in checks} == {Outcome.INCONCLUSIVE}
    assert "soft keys differ: driver" in checks[0].reason
    assert "--against" in checks[0].reason


def test_every_comparison_states_what_it_could_not_see(tmp_path: Path) -> None:
    engine = SimulatedEngine(seed=5)
    check = verdicts(engine, stored_baseline(engine, tmp_path), tmp_path)[0]
    assert "could be missed" in check.summary
    assert all(row["detectable %"] > row["band ± %"] for row in check.rows)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"profiled": True}, "has been profiled"),
        ({"outputs": "different"}, "different results"),
        ({"failing": True}, "requests failed, first: ConnectionError: gone"),
    ],
)
def test_a_measurement_that_broke_its_rules_is_invalid(tmp_path: Path, fault: dict[str, object], message: str) -> None:
    engine = SimulatedEngine(seed=6, **fault)  # type: ignore[arg-type]
    check = judge.validity(measured(engine, tmp_path), workload(), [])
    assert check.outcome is Outcome.INVALID
    assert message in check.reason


def test_a_foreign_process_makes_it_invalid(tmp_path: Path) -> None:
    check = judge.validity(measured(SimulatedEngine(seed=7), tmp_path), workload(), ["4711 python"])
    assert check.outcome is Outcome.INVALID
    assert "4711 python" in check.reason


def run_suite(
    engine: SimulatedEngine, tmp_path: Path, run: str, update: suite.UpdateRequest | None = None
) -> list[Check]:
    engine.new_session()
    plan = tmp_path / "simulated.json"
    plan.write_text(json.dumps({"name": "simulated", "processes": 3, "cells": [{"n": engine_width(engine)}]}))
    settings = suite.PerfSettings(baselines=tmp_path / "baselines", reports=tmp_path / "reports", run=engine)
    where = context(tmp_path, run)
    return suite.run(
        SuiteContext(model_path=where.model_path, out_dir=where.out_dir, workload=str(plan)), settings, update
    )


def engine_width(engine: SimulatedEngine) -> int:
    return getattr(engine, "width", 10)


@pytest.fixture
def clean_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashrec_harness.environment.git_commit", lambda root=None: COMMIT)


@pytest.mark.usefixtures("clean_tree")
def test_from_no_baseline_to_a_stored_one_that_refuses_another_width(tmp_path: Path) -> None:
    engine = SimulatedEngine(seed=8)
    first = run_suite(engine, tmp_path, "run-1")
    assert first[-1].outcome is Outcome.NOT_RUN
    assert first[-1].reason.startswith("no baseline for this device")

    early = run_suite(engine, tmp_path, "run-2", suite.UpdateRequest("first baseline"))
    assert early[-1].outcome is Outcome.FAIL
    assert "2 session(s), 3 needed" in early[-1].reason

    written = run_suite(engine, tmp_path, "run-3", suite.UpdateRequest("first baseline"))
    assert written[-1].outcome is Outcome.PASS
    (path,) = (tmp_path / "baselines").glob("*/simulated.json")
    assert [entry.run_id for entry in baselines.load(path).sessions] == ["run-1", "run-2", "run-3"]

    again = run_suite(engine, tmp_path, "run-4")
    assert again[-1].outcome is Outcome.PASS
    assert again[-1].name.startswith("against baseline n=10")

    engine.width = 64  # type: ignore[attr-defined]
    refused = run_suite(engine, tmp_path, "run-5")
    assert refused[-1].outcome is Outcome.NOT_RUN
    assert "comparison refused: cell 0 n: baseline 10, this run 64" in refused[-1].reason

    path.write_text(path.read_text().replace('"reason": "first baseline"', '"reason": "better"'))
    engine.width = 10  # type: ignore[attr-defined]
    edited = run_suite(engine, tmp_path, "run-6")
    assert edited[-1].outcome is Outcome.INVALID
    assert "the file was edited" in edited[-1].reason


@pytest.mark.usefixtures("clean_tree")
def test_an_invalid_run_neither_compares_nor_becomes_a_session(tmp_path: Path) -> None:
    engine = SimulatedEngine(seed=9, profiled=True)
    checks = run_suite(engine, tmp_path, "run-1", suite.UpdateRequest("sneaky"))
    assert [check.outcome for check in checks if check.name == "measurement is valid"] == [Outcome.INVALID]
    assert checks[-1].outcome is Outcome.FAIL
    assert "not valid" in checks[-1].reason
    assert json.loads((tmp_path / "reports/run-1/perf/session.json").read_text())["valid"] is False


def test_what_graphs_cost_is_reported_where_the_engine_tells() -> None:
    """Two processes: 1.5 and 2.5 s of captures, 96 and 128 MiB; a server tells the same under ``engine``."""
    told = [{"capture_seconds": 1.5, "graph_bytes": 96 << 20}, {"capture_seconds": 2.5, "graph_bytes": 128 << 20}]
    processes = [measured_process(told[0]), measured_process({"engine": told[1], "version": "1"})]
    check = judge.resources(Measurement(processes, None))
    assert [(row["graph capture s"], row["graph memory MiB"]) for row in check.rows] == [(1.5, 96), (2.5, 128)]
    assert check.summary.endswith("; graphs captured in 2.0 s (median), 128 MiB")


def test_without_graphs_their_cost_is_absent_not_zero() -> None:
    check = judge.resources(Measurement([measured_process({"graphs": 0})], None))
    assert [name for name in check.rows[0] if "graph" in name] == []
    assert "graphs" not in check.summary


def measured_process(configuration: dict[str, Any]) -> ProcessResult:
    return ProcessResult({}, {}, 1.0, False, 100.0, None, configuration, 1)
