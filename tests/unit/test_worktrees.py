"""Work trees of a scratch repository: what is checked out, what a snapshot holds, and that nothing is touched."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from flashrec.errors import ConfigError
from flashrec_harness.worktrees import Repository, python_path


def git(root: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", str(root), *identity, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    root = tmp_path / "scratch"
    root.mkdir()
    git(root, "init", "-q")
    (root / ".gitignore").write_text("ignored\n")
    (root / "file").write_text("first")
    git(root, "add", "--all")
    git(root, "commit", "-q", "-m", "first")
    (root / "file").write_text("second")
    git(root, "commit", "-q", "-a", "-m", "second")
    return root


def test_a_revision_is_checked_out_and_removed(scratch: Path) -> None:
    repository = Repository.around(scratch)
    first = repository.resolve("HEAD~1")
    assert first.label == f"HEAD~1 ({first.sha[:9]})"
    with repository.checkout(first.sha) as tree:
        assert (tree / "file").read_text() == "first"
        assert python_path(tree).startswith(str(tree / "engine"))
    assert not tree.exists()
    assert git(scratch, "worktree", "list").count("\n") == 0


def test_what_a_path_of_ours_holds_comes_behind_the_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"engine{os.pathsep}/opt/site")
    first, *_, last = python_path(tmp_path).split(os.pathsep)
    assert (first, last) == (str(tmp_path / "engine"), "/opt/site")
    monkeypatch.delenv("PYTHONPATH")
    assert len(python_path(tmp_path).split(os.pathsep)) == 2


def test_a_clean_trees_snapshot_is_its_commit(scratch: Path) -> None:
    snapshot = Repository.around(scratch).snapshot()
    assert snapshot.sha == git(scratch, "rev-parse", "HEAD")
    assert snapshot.label == snapshot.sha[:9]


def test_a_dirty_trees_snapshot_has_what_stands_there_and_leaves_it_alone(scratch: Path) -> None:
    (scratch / "file").write_text("edited")
    (scratch / "new").write_text("untracked")
    (scratch / "ignored").write_text("not mine")
    before = git(scratch, "status", "--porcelain=v2", "--branch")
    repository = Repository.around(scratch)
    snapshot = repository.snapshot()
    with repository.checkout(snapshot.sha) as tree:
        assert (tree / "file").read_text() == "edited"
        assert (tree / "new").read_text() == "untracked"
        assert not (tree / "ignored").exists()
    assert snapshot.label.endswith("+dirty")
    assert git(scratch, "status", "--porcelain=v2", "--branch") == before
    assert git(scratch, "branch", "--contains", snapshot.sha) == ""


def test_what_git_cannot_do_is_a_usage_error(scratch: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="revision nowhere"):
        Repository.around(scratch).resolve("nowhere")
    with pytest.raises(ConfigError, match="not in a git repository"):
        Repository.around(tmp_path)
