"""What may be compared with a baseline: one differing key refuses, by name; and what may not become one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from simulated_engine import SimulatedEngine

from flashrec_harness import cli, environment
from flashrec_harness.environment import Commit
from flashrec_harness.outcome import Check, Outcome, SuiteContext
from flashrec_harness.perf import suite
from flashrec_harness.planting import PLANT_VARIABLE
from flashrec_harness.report import model

CLEAN = Commit("c0ffee" * 6, False)


class Bench:
    """A checkpoint, a catalog and a baseline of three sessions, on a simulated engine."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.engine, self.runs = root, SimulatedEngine(seed=8), 0
        self.baselines, self.reports = root / "baselines", root / "reports"
        self.model = root / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text("{}")
        self.catalog = self.model / "catalog.json"
        self.catalog.write_text("{}")
        self.cell: dict[str, Any] = {"n": 10, "cache": "warm"}
        self.monkeypatch = monkeypatch
        monkeypatch.setattr(environment, "git_commit", lambda root=None: CLEAN)
        for number in range(3):
            update = suite.UpdateRequest("first baseline") if number == 2 else None
            checks = self.run(update)
        assert checks[-1].outcome is Outcome.PASS

    def plan(self) -> Path:
        path = self.root / "simulated.json"
        path.write_text(
            json.dumps({"name": "simulated", "processes": 3, "reference_requests": 0, "cells": [self.cell]})
        )
        return path

    def run(self, update: suite.UpdateRequest | None = None) -> list[Check]:
        self.runs += 1
        self.engine.new_session()
        context = SuiteContext(
            model_path=self.model,
            sid_vocab_file=self.catalog,
            workload=str(self.plan()),
            out_dir=self.reports / f"run-{self.runs}" / "perf",
        )
        settings = suite.PerfSettings(baselines=self.baselines, reports=self.reports, run=self.engine)
        return suite.run(context, settings, update)

    @property
    def file(self) -> Path:
        (path,) = self.baselines.glob("*/simulated.json")
        return path


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def other_gpu(bench: Bench) -> None:
    body = bench.file
    bench.monkeypatch.setattr(environment, "processor_name", lambda: "NVIDIA H100")
    target = bench.baselines / "nvidia-h100" / "simulated.json"
    target.parent.mkdir()
    target.write_text(body.read_text())
    body.unlink()


def other_catalog(bench: Bench) -> None:
    bench.catalog.write_text('{"0,0,0": 1}')


def other_model(bench: Bench) -> None:
    (bench.model / "config.json").write_text('{"layers": 1}')


def other_width(bench: Bench) -> None:
    bench.cell["n"] = 64


def cold_cache(bench: Bench) -> None:
    bench.cell["cache"] = "cold"


def other_concurrency(bench: Bench) -> None:
    bench.cell["concurrency"] = 2


@pytest.mark.parametrize(
    ("change", "key", "words"),
    [
        (other_gpu, "device", "this run 'NVIDIA H100'"),
        (other_catalog, "catalog", "catalog: baseline '"),
        (other_model, "model", "model: baseline '"),
        (other_width, "cell 0 n", "cell 0 n: baseline 10, this run 64"),
        (cold_cache, "cell 0 cache", "cell 0 cache: baseline 'warm', this run 'cold'"),
        (other_concurrency, "cell 0 concurrency", "cell 0 concurrency: baseline 1, this run 2"),
    ],
)
def test_one_differing_key_refuses_and_is_named(bench: Bench, change: Any, key: str, words: str) -> None:
    same = bench.run()
    assert [check.outcome for check in same if check.name.startswith("against baseline")] == [Outcome.PASS]
    change(bench)
    refused = bench.run()[-1]
    assert (refused.name, refused.outcome) == ("against baseline", Outcome.NOT_RUN)
    assert refused.reason.startswith("comparison refused: ")
    assert words in refused.reason
    named = [part.partition(": ")[0] for part in refused.reason.removeprefix("comparison refused: ").split("; ")]
    assert named == [key]


def test_a_gpu_without_a_baseline_names_those_that_have_one(bench: Bench) -> None:
    slug = bench.file.parent.name
    bench.monkeypatch.setattr(environment, "processor_name", lambda: "NVIDIA H100")
    check = bench.run()[-1]
    assert check.outcome is Outcome.NOT_RUN
    assert check.reason.endswith(f"device: baseline {slug}, this run 'NVIDIA H100'")


@pytest.mark.parametrize("dirt", ["dirty tree", "profiled run", "too few sessions", "wider band", "no reason"])
def test_a_baseline_is_not_written_lightly(bench: Bench, dirt: str) -> None:
    before = bench.file.read_text()
    update = suite.UpdateRequest("" if dirt == "no reason" else "why")
    expected = {
        "dirty tree": "+dirty; commit first",
        "profiled run": "this run is not valid",
        "too few sessions": "1 session(s), 3 needed",
        "wider band": "wider band (",
        "no reason": "--reason",
    }[dirt]
    if dirt == "dirty tree":
        bench.monkeypatch.setattr(environment, "git_commit", lambda root=None: Commit(CLEAN.sha, True))
    elif dirt == "profiled run":
        bench.engine.profiled = True
    elif dirt == "too few sessions":
        bench.monkeypatch.setattr(environment, "git_commit", lambda root=None: Commit("beef" * 10, False))
    elif dirt == "wider band":
        bench.engine.session_sd = bench.engine.process_sd = 0.2
    check = bench.run(update)[-1]
    assert (check.name, check.outcome) == ("baseline written", Outcome.FAIL)
    assert expected in check.reason
    assert bench.file.read_text() == before
    if dirt == "wider band":
        assert bench.run(suite.UpdateRequest("why", accept_wider=True))[-1].outcome is Outcome.PASS


def test_planted_and_dirty_sessions_are_in_no_baseline(bench: Bench) -> None:
    """Each is valid as a measurement, and of the same commit."""
    with bench.monkeypatch.context() as patch:
        patch.setenv(PLANT_VARIABLE, "slowdown")
        refused = bench.run(suite.UpdateRequest("why"))[-1]
        assert refused.outcome is Outcome.FAIL
        assert "carries slowdown on purpose" in refused.reason
    with bench.monkeypatch.context() as patch:
        patch.setattr(environment, "git_commit", lambda root=None: Commit(CLEAN.sha, True))
        bench.run()
    written = bench.run(suite.UpdateRequest("why"))[-1]
    assert written.outcome is Outcome.PASS
    runs = [session["run_id"] for session in json.loads(bench.file.read_text())["sessions"]]
    assert runs == ["run-1", "run-2", "run-3", "run-6"]


def test_the_command_line_says_which_key_differs(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole way: ``perf`` on the command line, its report, and its exit code."""
    bench.monkeypatch.setattr("flashrec_harness.perf.suite.measure", measure_with(bench.engine))
    bench.cell["n"] = 64
    arguments = ["perf", "--model-path", str(bench.model), "--workload", str(bench.plan()), "--strict"]
    arguments += ["--baselines-dir", str(bench.baselines), "--reports-dir", str(bench.reports)]
    with pytest.raises(SystemExit) as exit_info:
        cli.main(arguments)
    assert exit_info.value.code == 1
    spoken = " ".join(capsys.readouterr().out.split())
    assert "comparison refused" in spoken
    (check,) = [c for c in model.load(bench.reports / "latest").suites["perf"] if c.name == "against baseline"]
    assert "cell 0 n: baseline 10, this run 64" in check.reason


def measure_with(engine: SimulatedEngine) -> Any:
    from flashrec_harness.perf.measure import measure

    return lambda context, workload, *, yardsticks, run: measure(context, workload, yardsticks=yardsticks, run=engine)


def test_the_repeat_command_names_cells_and_commits(bench: Bench) -> None:
    settings = suite.PerfSettings(beam=4, concurrency=2, against="v0.1", candidate="HEAD~1", run=bench.engine)
    assert settings.flags == ["--beam", "4", "--concurrency", "2", "--against", "v0.1", "--candidate", "HEAD~1"]
    context = SuiteContext(model_path=bench.model, workload=str(bench.plan()), out_dir=bench.root / "out" / "perf")
    narrowed = suite.PerfSettings(baselines=bench.baselines, reports=bench.reports, beam=4, run=bench.engine)
    for check in suite.run(context, narrowed):
        words = check.repeat.split()
        assert words[:4] == ["python", "-m", "flashrec_harness", "perf"]
        assert words[-4:] == ["--beam", "4", "--baselines-dir", str(bench.baselines)]


def test_trends_stand_beside_the_cells_that_they_are_of(bench: Bench) -> None:
    """Cells whose names sort otherwise than they are measured: 1, 8 and 32 at once."""
    plan = bench.root / "cells.json"
    cells = [{"n": 2, "concurrency": c, "requests": 32} for c in (1, 8, 32)]
    plan.write_text(json.dumps({"name": "cells", "processes": 2, "rounds": 2, "reference_requests": 0, "cells": cells}))
    for number in range(3):
        out = bench.reports / f"cells-{number}" / "perf"
        context = SuiteContext(model_path=bench.model, workload=str(plan), out_dir=out)
        checks = suite.run(
            context, suite.PerfSettings(baselines=bench.baselines, reports=bench.reports, run=bench.engine)
        )
    figures = [check for check in checks if check.name.startswith("figures")]
    assert len(figures) == 3
    for check in figures:
        assert check.plots[-1].title == f"throughput over commits, {check.data['cell']}"
        assert max(check.plots[-1].series[0].y) == pytest.approx(max(check.data["samples"]["throughput"]), rel=0.1)
