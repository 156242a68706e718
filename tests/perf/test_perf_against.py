"""``perf --against``: engines of two commits in work trees, on a simulated clock, and once for real."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from simulated_engine import SimulatedEngine

from flashrec.errors import ConfigError
from flashrec_harness import stats
from flashrec_harness.children import ChildError
from flashrec_harness.outcome import Outcome, SuiteContext
from flashrec_harness.perf import against, suite
from flashrec_harness.perf.measure import ProcessResult
from flashrec_harness.perf.worker import Task
from flashrec_harness.perf.workload import Cell, Workload
from flashrec_harness.worktrees import Repository

ROOT = Path(__file__).parents[2]
PLAN = Workload(name="pair", cells=(Cell(n=10),), processes=2, rounds=5)


def git(root: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(root), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def scratch(tmp_path: Path) -> Repository:
    """Three commits whose engine is a file that says how slow it is: 1, 1 and 1.05 times."""
    root = tmp_path / "scratch"
    root.mkdir()
    git(root, "init", "-q")
    for commit, factor in enumerate(("1.0", "1.00", "1.05")):
        (root / "slowdown").write_text(factor)
        git(root, "add", "--all")
        git(root, "commit", "-q", "-m", str(commit))
    return Repository(root)


def simulated(tree: Path, task: Task, prefix: Path) -> ProcessResult:
    seed = int(prefix.name.partition("-")[0])
    engine = SimulatedEngine(seed=seed, session_sd=0.0, slowdown=float((tree / "slowdown").read_text()))
    return ProcessResult.of(engine(task, prefix))


@pytest.mark.parametrize(
    ("old", "new", "outcome"),
    [("HEAD~2", "HEAD~1", Outcome.PASS), ("HEAD~1", None, Outcome.FAIL), ("HEAD", "HEAD~1", Outcome.PASS)],
)
def test_each_side_is_measured_in_its_own_tree(
    scratch: Repository, tmp_path: Path, old: str, new: str | None, outcome: Outcome
) -> None:
    context = SuiteContext(model_path=tmp_path, out_dir=tmp_path / "out")
    valid, check = against.run(context, PLAN, old, new, repository=scratch, measure=simulated)
    assert valid.outcome is Outcome.PASS
    assert check.outcome is outcome
    assert check.name.startswith(f"against {old} (")
    assert scratch.git("worktree", "list").count("\n") == 0


def test_uncommitted_changes_are_the_candidate(scratch: Repository, tmp_path: Path) -> None:
    (scratch.root / "slowdown").write_text("1.2")
    context = SuiteContext(model_path=tmp_path, out_dir=tmp_path / "out")
    valid, check = against.run(context, PLAN, "HEAD", repository=scratch, measure=simulated)
    assert "+dirty" in valid.summary
    assert check.outcome is Outcome.FAIL
    assert check.rows[0]["change %"] == pytest.approx((1.05 / 1.2 - 1) * 100, abs=1)


@pytest.mark.parametrize(
    ("settings", "update", "message"),
    [
        (suite.PerfSettings(candidate="HEAD"), None, "--against REV names"),
        (suite.PerfSettings(against="HEAD"), suite.UpdateRequest("why"), "run it without --against"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    tmp_path: Path, settings: suite.PerfSettings, update: suite.UpdateRequest | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        suite.run(SuiteContext(model_path=tmp_path), settings, update)


def test_a_running_server_has_no_second_commit(scratch: Repository, tmp_path: Path) -> None:
    context = SuiteContext(model_path=tmp_path, url="http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="leave --url out"):
        against.run(context, PLAN, "HEAD", repository=scratch, measure=simulated)


@pytest.mark.slow
def test_a_process_that_imported_another_engine_is_an_error(
    suite_context: SuiteContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: a PYTHONPATH that does not name the tree. The worker then measures this checkout's engine."""
    monkeypatch.setattr(against, "python_path", lambda tree: f"{ROOT / 'engine'}:{ROOT / 'harness'}")
    task = Task.of("engine", suite_context, replace(PLAN, rounds=2, prompts=4))
    with pytest.raises(ChildError, match="not the one in"):
        against.measure_tree(tmp_path / "tree", task, tmp_path / "process")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_real_engines_in_real_work_trees(
    suite_context: SuiteContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This checkout against itself with a pause planted in ``Engine.generate``; `docs/perf-verdicts.md` has itself
    against itself, which says more of a machine than of the code."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(tmp_path / "clone")], check=True)
    repository = Repository(tmp_path / "clone")
    git(repository.root, "checkout", "--quiet", "--detach", Repository(ROOT).snapshot().sha)
    plant_pause(repository.root / "engine" / "flashrec" / "runtime" / "engine.py", milliseconds=800)
    for name in ("MIN_PAIRS", "MAX_PAIRS"):
        monkeypatch.setattr(stats, name, 3)  # six processes show what makes a call several times as long
    workload = replace(PLAN, rounds=2, warmup_rounds=1, prompts=8, cells=(Cell(n=4, concurrency=4, requests=4),))
    valid, check = against.run(suite_context, workload, "HEAD", repository=repository)
    assert valid.outcome is Outcome.PASS
    assert "detectable %" in check.rows[0]
    assert check.outcome is Outcome.FAIL, json.dumps(check.rows)


def plant_pause(source: Path, milliseconds: int) -> None:
    text = source.read_text(encoding="utf-8")
    marker = "    def generate("
    assert text.count(marker) == 1
    wrapped = (
        f"    def generate(self, *arguments, **options):\n        import time\n\n"
        f"        time.sleep({milliseconds / 1000})\n"
        f"        return self._generate(*arguments, **options)\n\n    def _generate("
    )
    source.write_text(text.replace(marker, wrapped), encoding="utf-8")
