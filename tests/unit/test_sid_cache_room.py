"""The folder of cached catalogs stays within its bytes, and loses what was used longest ago."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st
from sid_files import GROUPS, SPELLINGS, groups, make_layout, write

from flashrec.errors import ConfigError
from flashrec.sid.cache import load_catalog_and_trie
from flashrec.sid.cache_room import DEFAULT_BYTES, VARIABLE, make_room, most_bytes

LAYOUT = make_layout(8, 8, 16)
DAY = 24 * 3600


def _file(folder: Path, name: str, size: int = 10, age: float = 0) -> Path:
    path = folder / name
    path.write_bytes(b"x" * size)
    used = time.time() - age
    os.utime(path, (used, used))
    return path


def _name(number: int, ending: str = "zip") -> str:
    return f"{number:032x}.{ending}"


@hypothesis.given(
    st.lists(st.tuples(st.integers(0, 30), st.sampled_from(["zip", "npz"])), max_size=8),
    st.integers(0, 120),
    st.randoms(use_true_random=False),
)
def test_the_ones_used_last_stay_as_far_as_they_fit(
    entries: list[tuple[int, str]], most: int, shuffler: object
) -> None:
    order = list(range(len(entries)))
    shuffler.shuffle(order)  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in order:
            size, ending = entries[number]
            _file(folder, _name(number, ending), size, age=60.0 * number)
        make_room(folder, most)
        left = sorted(path.name for path in folder.iterdir())
    fitting = [count for count in range(len(entries) + 1) if sum(size for size, _ in entries[:count]) <= most]
    assert left == sorted(_name(number, entries[number][1]) for number in range(fitting[-1]))


def test_what_is_no_catalog_is_let_alone(tmp_path: Path) -> None:
    others = [_file(tmp_path, name, age=9 * DAY) for name in ("notes.zip", "0" * 31 + ".zip", _name(1, "zip.txt"))]
    (tmp_path / "sglang").mkdir()
    gone = _file(tmp_path, _name(1), age=9 * DAY)
    assert make_room(tmp_path, 0) == [gone]
    assert all(path.exists() for path in others)
    assert (tmp_path / "sglang").is_dir()


def test_an_unfinished_file_leaves_once_nobody_can_be_writing_it(tmp_path: Path) -> None:
    being_written = _file(tmp_path, _name(1, "abc_12.tmp"), age=DAY / 2)
    abandoned = _file(tmp_path, _name(1, "zzz_99.tmp"), age=2 * DAY)
    assert make_room(tmp_path, 1 << 20) == [abandoned]
    assert being_written.exists()


def test_a_catalog_that_is_read_again_outlasts_one_that_was_written_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"

    def load(spelling: str) -> set[Path]:
        catalog, _ = load_catalog_and_trie(
            write(tmp_path / spelling[0], SPELLINGS[spelling]), LAYOUT, cache_dir=folder, min_bytes=1
        )
        assert groups(catalog) == GROUPS
        return set(folder.iterdir())

    def age() -> None:
        for path in folder.iterdir():
            os.utime(path, (path.stat().st_mtime - 100,) * 2)

    (first,) = load("commas")
    age()
    (second,) = load("tsv") - {first}
    age()
    assert load("commas") == {first, second}
    monkeypatch.setenv(VARIABLE, str(2 * max(first.stat().st_size, second.stat().st_size) + 200))
    assert first in load("commas with an end level")
    assert not second.exists()
    assert len(list(folder.iterdir())) == 2


def test_nothing_is_kept_in_no_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    path = write(tmp_path / "a", SPELLINGS["commas"])
    for _ in range(2):
        assert groups(load_catalog_and_trie(path, LAYOUT, cache_dir=tmp_path / "cache", min_bytes=1)[0]) == GROUPS
    assert not list((tmp_path / "cache").iterdir())


def test_the_bytes_follow_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert most_bytes() == DEFAULT_BYTES
    monkeypatch.setenv(VARIABLE, "123456")
    assert most_bytes() == 123456


@pytest.mark.parametrize("text", ["8G", "-1", "1e9", " 5", "٣"])
def test_what_is_no_number_of_bytes_is_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ConfigError, match=f"{VARIABLE}: '{text}' is no number of bytes"):
        load_catalog_and_trie(write(tmp_path / "a", SPELLINGS["commas"]), LAYOUT, cache_dir=tmp_path, min_bytes=1)
