"""Bisection over a scratch repository: a planted bad commit is named, and what cannot be known is not guessed."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from flashrec.errors import ConfigError
from flashrec_harness import bisect, cli
from flashrec_harness.bisect import Step, UndecidedError, Word
from flashrec_harness.environment import Commit, Environment
from flashrec_harness.outcome import Check, Outcome
from flashrec_harness.report import writer
from flashrec_harness.report.model import RunReport
from flashrec_harness.worktrees import Repository, Revision

ROOT = Path(__file__).parents[2]
COMMITS = 9


def git(root: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", str(root), *identity, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def history(tmp_path: Path) -> Repository:
    """Commits "0" to "8"; from "5" on the file says that it is broken."""
    root = tmp_path / "scratch"
    root.mkdir()
    git(root, "init", "-q")
    for number in range(COMMITS):
        (root / "state").write_text(f"{number} {'broken' if number >= 5 else 'fine'}")
        git(root, "add", "--all")
        git(root, "commit", "-q", "-m", str(number))
    return Repository(root)


def read(tree: Path, revision: Revision) -> tuple[Word, str]:
    number, state = (tree / "state").read_text().split()
    return ("bad" if state == "broken" else "good"), f"{number} is {state}"


def ends(history: Repository) -> tuple[Revision, Revision]:
    return history.resolve("HEAD~8"), history.resolve("HEAD")


def test_the_planted_commit_is_named_in_few_steps(history: Repository) -> None:
    seen: list[Step] = []
    found = bisect.first_bad(history, *ends(history), read, seen.append)
    assert (found.subject, found.why) == ("5", "5 is broken")
    assert len(seen) <= 2 + 4
    assert history.git("worktree", "list").count("\n") == 0
    assert git(history.root, "status", "--porcelain") == ""
    assert git(history.root, "rev-parse", "HEAD") == ends(history)[1].sha


def test_uncommitted_changes_can_be_the_first_bad(history: Repository) -> None:
    git(history.root, "reset", "-q", "--hard", "HEAD~4")
    (history.root / "state").write_text("x broken")
    found = bisect.first_bad(history, history.resolve("HEAD~2"), history.snapshot(), read)
    assert found.why == "x is broken"


def test_a_commit_that_cannot_be_judged_is_skipped(history: Repository) -> None:
    def read_most(tree: Path, revision: Revision) -> tuple[Word, str]:
        word, why = read(tree, revision)
        return ("skip" if why.startswith(("3", "6")) else word), why

    assert bisect.first_bad(history, *ends(history), read_most).subject == "5"


def test_skipped_commits_beside_the_first_bad_are_said_to_be_undecided(history: Repository) -> None:
    def blind(tree: Path, revision: Revision) -> tuple[Word, str]:
        word, why = read(tree, revision)
        return ("skip" if why.startswith(("4", "5", "6")) else word), why

    with pytest.raises(UndecidedError, match="cannot be judged: ") as error:
        bisect.first_bad(history, *ends(history), blind)
    assert git(history.root, "rev-parse", "HEAD~3") in str(error.value)


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [("HEAD~1", "HEAD", "not good but bad: 7 is broken"), ("HEAD~8", "HEAD~5", "not bad but good: 3 is fine")],
)
def test_ends_that_are_not_what_they_are_said_to_be(history: Repository, good: str, bad: str, message: str) -> None:
    with pytest.raises(UndecidedError, match=message):
        bisect.first_bad(history, history.resolve(good), history.resolve(bad), read)


@pytest.mark.parametrize(
    ("outcomes", "word"),
    [
        ([Outcome.PASS, Outcome.NOT_RUN], "good"),
        ([Outcome.PASS, Outcome.INVALID, Outcome.FAIL], "bad"),
        ([Outcome.PASS, Outcome.KNOWN], "bad"),
        ([Outcome.PASS, Outcome.INCONCLUSIVE], "skip"),
        ([Outcome.NOT_RUN], "skip"),
        ([], "skip"),
    ],
)
def test_from_checks_to_a_word(outcomes: list[Outcome], word: Word) -> None:
    checks = [Check("parity", f"check {i}", outcome, "") for i, outcome in enumerate(outcomes)]
    other = Check("parity", "another", Outcome.FAIL, "")
    assert bisect.word_of([*checks, other], "check *")[0] == word


def test_a_suite_without_a_verdict_is_a_usage_error() -> None:
    with pytest.raises(ConfigError, match="bisect trace: no verdict to follow"):
        bisect.suite_judge("trace", [], "*", Revision("a" * 40, "good"))


def test_the_command_passes_the_suites_options_on(
    history: Repository, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[tuple[str, list[str], str]] = []

    def judge(suite: str, arguments: list[str], check: str, good: Revision) -> bisect.JudgeCommit:
        told.append((suite, arguments, check))
        return read

    monkeypatch.chdir(history.root)
    monkeypatch.setattr(bisect, "suite_judge", judge)
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["bisect", "parity", "--good", "HEAD~8", "--check", "float32*", "--quick", "--only", "sglang"])
    assert exit_info.value.code == 0
    assert told == [("parity", ["--quick", "--only", "sglang"], "float32*")]
    assert f"first bad commit: {git(history.root, 'rev-parse', 'HEAD~3')} 5" in capsys.readouterr().out


def test_a_suite_runs_with_the_trees_engine_and_its_report_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []

    def run(tree: Path, arguments: list[str]) -> tuple[int, str]:
        calls.append(arguments)
        if arguments[0] == "golden":
            return 1, "2 of 5 probes changed a bit\n"
        if arguments[0] == "kernel":
            return 1, "ImportError: no module\n\n"
        root = Path(arguments[arguments.index("--reports-dir") + 1])
        check = Check("parity", "float32 against transformers", Outcome.FAIL, "", reason="rank 3 differs")
        where = Environment(Commit("", False))
        writer.write(RunReport("run", "parity", "", datetime.now(UTC), 1.0, where, {"parity": [check]}), root)
        return 1, ""

    monkeypatch.setattr(bisect, "_run", run)
    good, here = Revision("a" * 40, "good"), Revision("b" * 40, "here")
    seen = {
        suite: bisect.suite_judge(suite, ["--quick"], "float32*", good)(tmp_path, here)
        for suite in ("parity", "perf", "golden", "kernel")
    }
    assert seen["parity"] == seen["perf"] == ("bad", "float32 against transformers: rank 3 differs")
    assert seen["golden"] == ("bad", "2 of 5 probes changed a bit")
    assert seen["kernel"] == ("skip", "ImportError: no module")
    parity, perf, golden, _ = calls
    assert parity[:2] == ["parity", "--quick"]
    assert perf[-4:] == ["--against", good.sha, "--candidate", here.sha]
    assert golden == ["golden", "between", good.sha, here.sha, "--quick"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_real_change_of_bits_is_found_in_real_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """This checkout, a harmless commit, and one with another epsilon in every norm."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(clone)], check=True)
    git(clone, "checkout", "--quiet", "--detach", Repository(ROOT).snapshot().sha)
    model = clone / "engine" / "flashrec" / "models" / "qwen3.py"
    for subject in ("comment", "epsilon"):
        text = model.read_text(encoding="utf-8")
        if subject == "epsilon":
            assert text.count('required(raw, "rms_norm_eps")') == 1
            text = text.replace('required(raw, "rms_norm_eps")', '1.01 * required(raw, "rms_norm_eps")')
        model.write_text(text + f"# {subject}\n", encoding="utf-8")
        git(clone, "commit", "--quiet", "--all", "-m", subject)
    monkeypatch.chdir(clone)
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["bisect", "golden", "--good", "HEAD~2", "--quick"])
    said = capsys.readouterr().out
    assert exit_info.value.code == 0, said
    assert said.rstrip().endswith("epsilon")
    unwrapped = " ".join(said.split())  # where a line breaks depends on the subject of this checkout's commit
    assert unwrapped.count("probes changed a bit") == 3
