"""Histories: reading, joining windows, and keeping test rows out of the training data."""

from __future__ import annotations

import gzip
import itertools
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrec.errors import CatalogError
from flashrec_harness.checkpoints.sequences import (
    History,
    assert_no_leak,
    drop_held_out,
    hold_out,
    join_windows,
    read_histories,
    write_histories,
)

ITEMS = st.sampled_from("abcdef")
HISTORIES = st.lists(
    st.builds(History, st.sampled_from(["u", "v"]), st.lists(ITEMS, min_size=1, max_size=8).map(tuple)), max_size=6
)
ROWS = st.lists(
    st.builds(History, st.sampled_from(["u", "v"]), st.lists(ITEMS, min_size=1, max_size=3).map(tuple), ITEMS),
    max_size=6,
)


def pairs(histories: list[History]) -> set[tuple[str, str, str]]:
    return {(h.user, *pair) for h in histories for pair in itertools.pairwise(h.items)}


@given(HISTORIES, ROWS)
def test_no_training_transition_is_a_test_row(histories: list[History], rows: list[History]) -> None:
    kept = drop_held_out(histories, rows)
    assert_no_leak(kept, rows)
    banned = {(row.user, row.items[-1], row.target) for row in rows}
    assert pairs(kept) == pairs(histories) - banned
    assert sorted(i for h in kept for i in h.items) == sorted(i for h in histories for i in h.items)


def test_nothing_reaches_across_a_cut() -> None:
    kept = drop_held_out([History("u", tuple("abcd"))], [History("u", ("b",), "c"), History("v", ("a",), "b")])
    assert [h.items for h in kept] == [("a", "b"), ("c", "d")]


def test_a_planted_leak_is_caught() -> None:
    """Negative control: the assertion fires on exactly the leak that dropping removes."""
    rows = [History("u", ("x", "a"), "b")]
    with pytest.raises(CatalogError, match="leak: user u: a -> b"):
        assert_no_leak([History("u", ("z", "a", "b"))], rows)
    assert_no_leak([History("v", ("a", "b")), History("u", ("a", "x", "b"))], rows)


def test_windows_of_a_user_are_joined() -> None:
    windows = [
        History("u", tuple("abc")),
        History("v", tuple("bcd")),
        History("u", tuple("bcd")),
        History("u", tuple("cde")),
        History("u", tuple("bc")),
        History("u", tuple("xy")),
    ]
    assert join_windows(windows) == [
        History("u", tuple("abcde")),
        History("u", tuple("xy")),
        History("v", tuple("bcd")),
    ]


@given(st.lists(st.integers(), min_size=2, max_size=30, unique=True), st.integers(2, 10))
def test_sliding_windows_are_joined_to_the_whole(items: list[int], size: int) -> None:
    whole = tuple(map(str, items))
    windows = [History("u", whole[max(0, end - size) : end]) for end in range(1, len(whole) + 1)]
    assert join_windows(windows) == [History("u", whole)]


def test_files_are_read_back(tmp_path: Path) -> None:
    rows = [History("u", ("a", "b"), "c"), History("v", ("d",))]
    write_histories(tmp_path / "h.csv", rows)
    assert read_histories(tmp_path / "h.csv") == rows


def test_the_last_item_is_held_out() -> None:
    assert hold_out([History("u", ("a", "b", "c"))]) == [History("u", ("a", "b"), "c")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("user,items\nu,a\n", "no column"),
        ("user_id,history_item_ids\n", "no rows"),
        ("user_id,history_item_ids\nu,a\nv,\n", "row 3: empty history_item_ids"),
    ],
)
def test_a_malformed_file_is_an_error_that_says_where(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "bad.csv"
    file.write_text(content)
    with pytest.raises(CatalogError, match=message) as raised:
        read_histories(file)
    assert str(file) in str(raised.value)
    assert "\n" not in str(raised.value)


WRITTEN = [("u", ("a", "日本"), "b"), ("v", ("b",), None), ("v", ("c", "b"), "a c")]


@pytest.mark.parametrize("bom", [False, True])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("separator", [",", "\t"])
@pytest.mark.parametrize("zipped", [False, True])
def test_histories_in_every_text_form(tmp_path: Path, bom: bool, line_end: str, separator: str, zipped: bool) -> None:
    lines = ["user_id,history_item_ids,target_item_id"] + [f"{u},{' '.join(i)},{t or ''}" for u, i, t in WRITTEN]
    data = line_end.join(lines).replace(",", separator).encode("utf-8-sig" if bom else "utf-8")
    file = tmp_path / "h"
    file.write_bytes(gzip.compress(data) if zipped else data)
    rows = read_histories(file)
    assert [(row.user, row.items, row.target) for row in rows] == WRITTEN
    assert [row.targets for row in rows] == [("b",), (), ("a", "c")]


def test_histories_in_parquet_may_hold_lists_and_numbers(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {"user_id": [1, 2], "history_item_ids": [["a", "b"], ["c"]], "target_item_id": [7, None], "more": [0, 0]}
    )
    frame["target_item_id"] = frame["target_item_id"].astype("Int64")
    frame.to_parquet(tmp_path / "h")
    first, second = read_histories(tmp_path / "h")
    assert (first.user, first.items, first.targets) == ("1", ("a", "b"), ("7",))
    assert (second.items, second.target) == (("c",), None)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no rows"),
        (b"user_id,history_item_ids\nu,a,b\n", "row 2: more cells"),
        (b"user_id,history_item_ids\nu,\n", "row 2: empty history_item_ids"),
        (b"user_id,items\nu,a\n", "no column"),
        (b"user_id,history_item_ids\nu,\xff\n", "line 2: byte 0xff is not UTF-8"),
        (b"\x1f\x8bjunk", "cannot read the histories"),
        (b"PAR1junk", "broken Parquet file"),
        (b'user_id,history_item_ids\nu,"' + b"a" * 200_000 + b'"\n', "not a table"),
    ],
)
def test_malformed_histories_name_file_and_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    file = tmp_path / "h"
    file.write_bytes(content)
    with pytest.raises(CatalogError, match=reason) as caught:
        read_histories(file)
    assert str(caught.value).startswith(f"{file}: ")
    with pytest.raises(CatalogError, match="cannot read the histories"):
        read_histories(tmp_path / "gone")
