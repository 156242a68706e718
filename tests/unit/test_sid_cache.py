"""The on-disk cache: found by content, never trusted when damaged, written as a whole or not at all."""

from __future__ import annotations

import ast
import io
import json
import logging
import os
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
from sid_files import GROUPS, SPELLINGS, groups, make_layout, write

from flashrec.errors import CatalogError
from flashrec.sid import cache
from flashrec.sid.cache import default_cache_dir, load_catalog_and_trie
from flashrec.sid.catalog import Catalog
from flashrec.sid.codes import Packing
from flashrec.sid.trie import Trie

LAYOUT = make_layout(8, 8, 16)


class Reader:
    """Reads through a cache folder and counts how often the catalog file itself was parsed."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder / "cache"
        self.parsed = 0
        load_catalog = cache.load_catalog

        def counting(*args: object, **options: object) -> Catalog:
            self.parsed += 1
            return load_catalog(*args, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(cache, "load_catalog", counting)

    def __call__(self, path: Path, **options: object) -> tuple[Catalog, Trie]:
        defaults: dict[str, object] = {"layout": LAYOUT, "min_bytes": 1} | options
        return load_catalog_and_trie(path, cache_dir=self.folder, **defaults)  # type: ignore[arg-type]

    @property
    def entries(self) -> list[Path]:
        return sorted(self.folder.iterdir()) if self.folder.exists() else []


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    return Reader(tmp_path, monkeypatch)


@pytest.mark.parametrize("spelling", ["commas with an end level", "tsv"])
def test_the_second_read_comes_from_the_cache_and_is_equal(tmp_path: Path, reader: Reader, spelling: str) -> None:
    first, first_trie = reader(write(tmp_path / "a", SPELLINGS[spelling]))
    second, second_trie = reader(write(tmp_path / "b", SPELLINGS[spelling]))
    assert reader.parsed == 1
    assert [entry.suffix for entry in reader.entries] == [".zip"]
    assert groups(first) == groups(second) == GROUPS
    assert second.path == tmp_path / "b"
    assert (second.digest, second.has_end_level) == (first.digest, first.has_end_level)
    assert second.plain_items is first.plain_items is True
    assert (second.titles or [])[:] == (first.titles or [])[:]
    assert second.ranks_of_items(["c"]).tolist() == [1]
    for name, array in first_trie.arrays().items():
        assert np.array_equal(array, second_trie.arrays()[name])
        assert array.dtype == second_trie.arrays()[name].dtype


def test_other_content_layout_or_packing_is_another_entry(tmp_path: Path, reader: Reader) -> None:
    path = write(tmp_path / "a", SPELLINGS["commas"])
    reader(path)
    reader(path, layout=make_layout(8, 8, 17))
    reader(path, layout=make_layout(8, 8, 16, end=False))
    write(path, SPELLINGS["commas"] + "\n")
    reader(path)
    packed = write(tmp_path / "p", SPELLINGS["packed"])
    reader(packed)
    reader(packed, packing=Packing())
    assert reader.parsed == len(reader.entries) == 6


def test_a_damaged_entry_is_read_anew_with_a_warning(
    tmp_path: Path, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a", SPELLINGS["tsv"])
    reader(path)
    (entry,) = reader.entries
    whole = entry.read_bytes()
    with zipfile.ZipFile(entry) as archive:
        name, *_ = json.loads(archive.read("arrays.json"))
        data = archive.read(name)
    place = whole.index(data) + len(data) // 2  # in the middle of the first array: only the checksum can tell
    flipped = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
    short = io.BytesIO()
    with zipfile.ZipFile(entry) as archive, zipfile.ZipFile(short, "w") as fewer:
        for member in archive.namelist():
            fewer.writestr(member, archive.read(member)[: -1 if member == "sids" else None])
    damages = [whole[:100], b"", flipped, b"PK" + whole[2:-40], short.getvalue()]
    for parsed, damaged in enumerate(damages, start=2):
        entry.write_bytes(damaged)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            catalog, _ = reader(path)
        assert groups(catalog) == GROUPS
        assert reader.parsed == parsed
        assert "damaged catalog cache" in caplog.text
        assert entry.read_bytes() == whole


def test_equal_content_is_equal_bytes_at_any_time(
    tmp_path: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a", SPELLINGS["tsv"])
    written = []
    for day in (0, 20_000):
        monkeypatch.setattr("time.time", lambda day=day: day * 86_400.0)
        reader(path)
        (entry,) = reader.entries
        written.append(entry.read_bytes())
        entry.unlink()
    assert written[0] == written[1]


def test_whatever_byte_is_damaged_the_catalog_is_right(tmp_path: Path, reader: Reader) -> None:
    path = write(tmp_path / "a", SPELLINGS["tsv"])
    reader(path)
    (entry,) = reader.entries
    whole = entry.read_bytes()
    found = 0
    for place, byte in enumerate(whole):
        for flipped in (byte ^ (1 << place % 8), byte ^ 0xFF):
            entry.write_bytes(whole[:place] + bytes([flipped]) + whole[place + 1 :])
            loaded = cache._load(entry, path)
            found += loaded is None
            assert loaded is None or groups(loaded[0]) == GROUPS
    assert found > len(whole)


@pytest.mark.parametrize("method", [8, 12, 14, 93, 0xFFFF], ids=["deflate", "bzip2", "lzma", "zstandard", "unknown"])
def test_an_entry_said_to_be_compressed_is_read_anew(tmp_path: Path, reader: Reader, method: int) -> None:
    path = write(tmp_path / "a", SPELLINGS["tsv"])
    reader(path)
    (entry,) = reader.entries
    whole = entry.read_bytes()
    directory = whole.index(b"PK\x01\x02")
    places = [directory + found.start() for found in re.finditer(b"PK\x01\x02", whole[directory:])]
    assert len(places) == len(zipfile.ZipFile(entry).namelist())
    for place in places:
        damaged = bytearray(whole)
        damaged[place + 10 : place + 12] = method.to_bytes(2, "little")
        entry.write_bytes(damaged)
        assert cache._load(entry, path) is None


def test_an_unwritable_cache_costs_a_warning_only(
    tmp_path: Path, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    reader.folder.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        catalog, _ = reader(write(tmp_path / "a", SPELLINGS["commas"]))
    assert groups(catalog) == GROUPS
    assert "cannot write the catalog cache" in caplog.text


def test_a_write_that_fails_leaves_nothing_behind(
    tmp_path: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", broken)
    reader(write(tmp_path / "a", SPELLINGS["commas"]))
    assert reader.entries == []


@pytest.mark.parametrize("spelling", sorted(SPELLINGS))
def test_reading_parses_no_python(
    tmp_path: Path, reader: Reader, spelling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As numpy's own files would, and Triton does on another thread: CPython 3.11 fails where two do at once."""
    monkeypatch.setattr(ast, "parse", None)
    path = write(tmp_path / "a", SPELLINGS[spelling])
    for _ in range(2):
        assert groups(reader(path)[0]) == GROUPS
    assert reader.parsed == 1


def test_small_files_are_not_cached(tmp_path: Path, reader: Reader) -> None:
    path = write(tmp_path / "a", SPELLINGS["commas"])
    reader(path, min_bytes=path.stat().st_size + 1)
    assert reader.entries == []


def test_a_bad_catalog_is_an_error_and_never_an_entry(tmp_path: Path, reader: Reader) -> None:
    with pytest.raises(CatalogError, match="row 1"):
        reader(write(tmp_path / "a", '{"1,2": "x"}'))
    with pytest.raises(CatalogError, match="cannot read the catalog"):
        reader(tmp_path / "gone")
    assert reader.entries == []


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHREC_CACHE_DIR", str(tmp_path / "mine"))
    assert default_cache_dir() == tmp_path / "mine"
    monkeypatch.delenv("FLASHREC_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir() == tmp_path / "xdg" / "flashrec"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_cache_dir() == tmp_path / "home" / ".cache" / "flashrec"
