"""The environment's tiers: what is compared, and what tells two of them apart."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from flashrec_harness import environment


def test_content_digest_sees_content_names_and_sizes(tmp_path: Path) -> None:
    a, b = tmp_path / "a.bin", tmp_path / "b.bin"
    a.write_bytes(b"one")
    b.write_bytes(b"two")
    before = environment.content_digest(a, b)
    assert before == environment.content_digest(b, a)
    b.write_bytes(b"twO")
    assert environment.content_digest(a, b) != before


def test_large_files_are_sampled_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_SAMPLED_ABOVE_BYTES", 1000)
    monkeypatch.setattr(environment, "_SAMPLE_BYTES", 10)
    path = tmp_path / "w.safetensors"
    path.write_bytes(bytes(100_000))
    digests = {environment.content_digest(path)}
    for position in (0, 99_999):
        data = bytearray(100_000)
        data[position] = 1
        path.write_bytes(data)
        digests.add(environment.content_digest(path))
    assert len(digests) == 3


def git(root: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
    subprocess.run(["git", "-C", str(root), *identity, *arguments], check=True, capture_output=True)


def test_commit_and_dirt(tmp_path: Path) -> None:
    assert environment.git_commit(tmp_path).label == "no commit"
    git(tmp_path, "init", "-q")
    (tmp_path / "f").write_text("1")
    assert environment.git_commit(tmp_path).label == "no commit+dirty"
    git(tmp_path, "add", "f")
    git(tmp_path, "commit", "-qm", "the subject")
    clean = environment.git_commit(tmp_path)
    assert (clean.dirty, clean.subject, len(clean.sha)) == (False, "the subject", 40)
    (tmp_path / "f").write_text("2")
    assert environment.git_commit(tmp_path).label == clean.sha[:9] + "+dirty"


def test_collect_has_the_device_as_a_hard_key_and_dumps_as_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    found = environment.collect(model_path=tmp_path, hard={"cell 0 n": 50})
    assert {"device", "model", "cell 0 n"} <= found.hard.keys()
    assert {"torch", "driver", "python"} <= found.soft.keys()
    assert json.loads(environment.dump(found))["hard"]["cell 0 n"] == 50


def test_differing_keys_include_missing_ones() -> None:
    assert environment.differing_keys({"a": 1, "b": 2}, {"b": 3, "c": None}) == {
        "a": (1, None),
        "b": (2, 3),
        "c": (None, None),
    }
