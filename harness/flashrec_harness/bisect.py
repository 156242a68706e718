"""Which commit broke it: a suite's verdict over history, by ``git bisect`` in a work tree of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from flashrec.errors import ConfigError
from flashrec_harness.children import last_error
from flashrec_harness.outcome import Check, Outcome
from flashrec_harness.report.model import load
from flashrec_harness.worktrees import Repository, Revision, python_path

Word = Literal["good", "bad", "skip"]
SUITES = ("kernel", "parity", "determinism", "perf", "golden")


class UndecidedError(Exception):
    """History does not name one commit: an end is not what it was said to be, or what is left cannot be judged."""


@dataclass(frozen=True, slots=True)
class Step:
    """One judged commit; ``why`` is the evidence in a line."""

    revision: Revision
    subject: str
    word: Word
    why: str


JudgeCommit = Callable[[Path, Revision], tuple[Word, str]]
"""Judges the commit that is checked out in a work tree."""


def first_bad(
    repository: Repository,
    good: Revision,
    bad: Revision,
    judge: JudgeCommit,
    announce: Callable[[Step], None] = lambda step: None,
) -> Step:
    """The first bad commit between ``good`` and ``bad``, both of which are judged before anything is searched.

    The search is git's own, skips and merges included. Raises :class:`UndecidedError`.
    """
    steps: dict[str, Step] = {}

    def see(tree: Path, revision: Revision) -> Step:
        word, why = judge(tree, revision)
        subject = repository.git("log", "-1", "--format=%s", revision.sha)
        steps[revision.sha] = Step(revision, subject, word, why)
        announce(steps[revision.sha])
        return steps[revision.sha]

    for end, expected in ((bad, "bad"), (good, "good")):
        with repository.checkout(end.sha) as tree:
            found = see(tree, end)
        if found.word != expected:
            raise UndecidedError(f"{end.label} is not {expected} but {found.word}: {found.why or 'no reason given'}")
    with repository.checkout(bad.sha) as tree:
        answer = _bisect(tree, "start", bad.sha, good.sha)
        while "is the first bad commit" not in answer:
            if "skip'ped commits left" in answer:
                raise UndecidedError(f"the commits that are left cannot be judged: {', '.join(_shas(answer))}")
            here = Repository(tree).resolve("HEAD")
            answer = _bisect(tree, see(tree, Revision(here.sha, here.sha[:9])).word)
    (sha, *_) = _shas(answer)
    return steps[sha]


def _bisect(tree: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(tree), "bisect", *arguments], capture_output=True, text=True, check=False)
    if done.returncode not in (0, 2):
        raise ConfigError(f"git bisect {arguments[0]}: {' '.join((done.stderr + done.stdout).split())[-300:]}")
    return done.stdout


def _shas(text: str) -> list[str]:
    words = text.split()
    return [word for word in words if len(word) == 40 and set(word) <= set("0123456789abcdef")]


def suite_judge(suite: str, arguments: Sequence[str], check: str, good: Revision) -> JudgeCommit:
    """Judge a commit's engine by a suite of this harness, run in a process of its own.

    ``check`` narrows the verdict to the checks of that name (``*`` and ``?`` as in file names). ``perf`` is paired
    against the good commit, and ``golden`` compares every bit with the good commit's.
    """
    if suite not in SUITES:
        raise ConfigError(f"bisect {suite}: no verdict to follow; there are {', '.join(SUITES)}")

    def judge(tree: Path, revision: Revision) -> tuple[Word, str]:
        with tempfile.TemporaryDirectory(prefix="flashrec-bisect-") as directory:
            command = [suite, *arguments, "--reports-dir", directory]
            if suite == "perf":
                command += ["--against", good.sha, "--candidate", revision.sha]
            elif suite == "golden":
                command = ["golden", "between", good.sha, revision.sha, *arguments]
            code, output = _run(tree, command)
            if suite == "golden":
                words: dict[int, Word] = {0: "good", 1: "bad"}
                return words.get(code, "skip"), last_error(output)
            if not (Path(directory) / "latest").exists():
                return "skip", last_error(output)
            return word_of(load(Path(directory) / "latest").judged, check)

    return judge


def word_of(checks: Sequence[Check], pattern: str) -> tuple[Word, str]:
    """Bad if a check fails, listed as known or not; good if some pass and the rest is merely not run; else skip."""
    chosen = [one for one in checks if fnmatchcase(one.name, pattern)]
    for word, outcomes in (("bad", (Outcome.FAIL, Outcome.KNOWN)), ("skip", (Outcome.INVALID, Outcome.INCONCLUSIVE))):
        for one in chosen:
            if one.outcome in outcomes:
                return ("bad" if word == "bad" else "skip"), f"{one.name}: {one.reason or one.summary}"
    passed = sum(one.outcome is Outcome.PASS for one in chosen)
    return ("good", f"{passed} checks pass") if passed else ("skip", f"no check named {pattern} was judged")


def _run(tree: Path, arguments: Sequence[str]) -> tuple[int, str]:
    """Without byte code: two commits' files of the same size and second would share it."""
    done = subprocess.run(
        [sys.executable, "-m", "flashrec_harness", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": python_path(tree), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "200"},
        check=False,
    )
    return done.returncode, done.stdout + done.stderr
