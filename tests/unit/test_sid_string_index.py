"""The item index against a dictionary, with strings of every length around its words of eight bytes."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrec.sid import string_index
from flashrec.sid.sorting import distinct
from flashrec.sid.string_index import StringIndex, hash_strings
from flashrec.sid.strings import StringTable

TEXT = st.text("ab", max_size=20) | st.text(max_size=9) | st.sampled_from(["x" * size for size in (7, 8, 9, 16, 17)])


def places(known: list[str], wanted: list[str]) -> list[tuple[int, int]]:
    return [(query, place) for query, text in enumerate(wanted) for place, held in enumerate(known) if held == text]


def found(known: list[str], wanted: list[str]) -> list[tuple[int, int]]:
    table = StringTable.of(known)
    query, position = StringIndex.build(table).find(table, StringTable.of(wanted))
    return list(zip(query.tolist(), position.tolist(), strict=True))


@given(st.lists(TEXT, max_size=30), st.lists(TEXT, max_size=10), st.data())
def test_find_equals_a_scan(known: list[str], others: list[str], data: st.DataObject) -> None:
    wanted = others + (data.draw(st.lists(st.sampled_from(known), max_size=10)) if known else [])
    assert found(known, wanted) == places(known, wanted)


@given(st.lists(TEXT, min_size=1, max_size=30))
def test_find_equals_a_scan_when_every_hash_is_the_same(known: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(string_index, "hash_strings", lambda table: np.zeros(len(table), dtype=np.uint64))
        assert found(known, known) == places(known, known)


def test_large_tables_are_hashed_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    table = StringTable.of([f"item-{number}" for number in range(1000)])
    whole = hash_strings(table)
    monkeypatch.setattr(string_index, "_SLICE", 7)
    assert np.array_equal(hash_strings(table), whole)
    assert len(np.unique(whole)) == 1000


def test_the_hash_sees_every_byte_and_the_length() -> None:
    texts = ["", "\0", "\0\0", "a", "a\0", "a" * 8, "a" * 9, "a" * 16, "a" * 15 + "b", "b" + "a" * 15, "a" * 7 + "ba"]
    assert len(set(hash_strings(StringTable.of(texts)).tolist())) == len(texts)


def test_a_hash_is_a_function_of_the_bytes_alone() -> None:
    """Not of ``PYTHONHASHSEED``, since it goes to disk, nor of where the string stands."""
    texts = ["item-1", "日本", "x" * 40]
    code = (
        "import json, sys; from flashrec.sid.string_index import hash_strings; "
        "from flashrec.sid.strings import StringTable; "
        "print(json.dumps(hash_strings(StringTable.of(json.loads(sys.argv[1]))).tolist()))"
    )
    other = subprocess.run(
        [sys.executable, "-c", code, json.dumps(texts[::-1])], capture_output=True, text=True, check=True
    )
    assert json.loads(other.stdout) == hash_strings(StringTable.of(texts)).tolist()[::-1]


@given(st.lists(st.integers(-3, 3), max_size=12))
def test_distinct_counts_as_unique_does(values: list[int]) -> None:
    ranks, counts = distinct(np.array(values, dtype=np.int64))
    assert dict(zip(ranks.tolist(), counts.tolist(), strict=True)) == {value: values.count(value) for value in values}
    assert ranks.tolist() == sorted(set(values))
