"""Commits side by side: work trees of any revision, and the working tree as it stands as a commit of its own."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flashrec.errors import ConfigError
from flashrec_harness.children import harness_root

_IDENTITY = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "flashrec-harness"), ("EMAIL", "harness@localhost"))
}


@dataclass(frozen=True, slots=True)
class Revision:
    """A commit to check out, and what reports call it."""

    sha: str
    label: str


@dataclass(frozen=True, slots=True)
class Repository:
    """A git repository, by the top of its working tree."""

    root: Path

    @classmethod
    def around(cls, start: Path | None = None) -> Repository:
        """The repository that holds ``start`` (default: the working directory). Raises :class:`ConfigError`."""
        here = start or Path.cwd()
        return cls(Path(_git(here, "rev-parse", "--show-toplevel", what=f"{here}: not in a git repository")))

    def git(self, *arguments: str, env: Mapping[str, str] | None = None, what: str = "") -> str:
        """Standard output of a git command, stripped. Raises :class:`ConfigError` with ``what`` and git's words."""
        return _git(self.root, *arguments, env=env, what=what)

    def resolve(self, revision: str) -> Revision:
        """A commit by any name that git knows. Raises :class:`ConfigError`."""
        sha = self.git("rev-parse", "--verify", f"{revision}^{{commit}}", what=f"revision {revision}")
        return Revision(sha, revision if sha.startswith(revision) else f"{revision} ({sha[:9]})")

    def snapshot(self) -> Revision:
        """The working tree as it stands: its commit, or, with uncommitted changes, a commit made of them.

        The commit belongs to no branch, and neither the index nor the working tree is touched: what is measured
        for half an hour is then not what is edited meanwhile. Untracked files are in it, ignored ones are not.
        """
        head = self.git("rev-parse", "--verify", "HEAD", what="no commit yet")
        if not self.git("status", "--porcelain"):
            return Revision(head, head[:9])
        with tempfile.TemporaryDirectory(prefix="flashrec-index-") as directory:
            env = {"GIT_INDEX_FILE": str(Path(directory) / "index"), **_IDENTITY}
            self.git("read-tree", "HEAD", env=env)
            self.git("add", "--all", env=env)
            tree = self.git("write-tree", env=env)
            sha = self.git("commit-tree", tree, "-p", head, "-m", "working tree, as measured", env=env)
        return Revision(sha, f"{head[:9]}+dirty")

    @contextmanager
    def checkout(self, sha: str) -> Iterator[Path]:
        """A detached work tree of a commit, removed when the context ends."""
        with tempfile.TemporaryDirectory(prefix="flashrec-tree-") as directory:
            tree = Path(directory) / sha[:9]
            self.git("worktree", "add", "--detach", str(tree), sha, what=f"revision {sha}")
            try:
                yield tree
            finally:
                self.git("worktree", "remove", "--force", str(tree))


def python_path(tree: Path) -> str:
    """``PYTHONPATH`` for the engine of a work tree under *this* harness: one instrument judges every commit.

    What is on ours comes behind them: dependencies may be installed there.
    """
    inherited = filter(None, [os.environ.get("PYTHONPATH")])
    return os.pathsep.join([str(tree / "engine"), str(harness_root()), *inherited])


def _git(directory: Path, *arguments: str, env: Mapping[str, str] | None = None, what: str = "") -> str:
    done = subprocess.run(
        ["git", "-C", str(directory), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **(env or {})},
        check=False,
    )
    if done.returncode != 0:
        words = " ".join(done.stderr.split())[-200:]
        raise ConfigError(f"{what or 'git ' + arguments[0]}: {words}")
    return done.stdout.strip()
