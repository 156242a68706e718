"""Reading rows in blocks must say what reading them one by one says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sid_files import groups

from flashrec.errors import CatalogError
from flashrec.sid import bulk, formats, tables
from flashrec.sid.catalog import load_catalog
from flashrec.sid.codes import NotationError, is_plain, parse_sid
from flashrec.sid.parquet import ParquetPart


@pytest.mark.parametrize(
    ("texts", "codes"),
    [
        (["1,2,3", "40,0,007"], [[1, 2, 3], [40, 0, 7]]),
        (["5", "123456789"], [[5], [123456789]]),
        (["<a_1><b_20>", "<a_300><b_4>"], [[1, 20], [300, 4]]),
        (["<|sid_begin|><s_a_1><|sid_end|>", "<|sid_begin|><s_a_77><|sid_end|>"], [[1], [77]]),
        (["1, 2", "3, 4"], [[1, 2], [3, 4]]),
    ],
)
def test_texts_of_one_shape(texts: list[str], codes: list[list[int]]) -> None:
    found = bulk.codes_of_texts(texts)
    assert found is not None
    assert found.dtype == np.int32
    assert found.tolist() == codes


@pytest.mark.parametrize(
    "texts",
    [
        [],
        [""],
        ["x"],
        ["1,2", "1,2,3"],
        ["1,2", ",12"],  # the numbers and the comma are as many, but not in the same places
        ["1,2", "1,"],
        ["<a_1><b_2>", "<1a_><b_2>"],
        ["<a_1><b_2>", "<a_1><c_2>"],
        ["<a_1><b_2>", "<s_a_1><s_b_2>"],
        ["<b_1><a_2>", "<b_1><a_2>"],
        ["1,2", "1,-2"],
        ["1,2", "1,1234567890"],
        ["1,2", "1,٣"],
        ["1,2", "1\n2"],
        ["1,2", 5],
        ["<item1><kind2>", "<item1><kind2>"],
    ],
)
def test_other_texts_are_left_to_the_careful_reader(texts: list[object]) -> None:
    assert bulk.codes_of_texts(texts) is None


@given(
    st.lists(st.sampled_from(["1,2", "3,4", "10,20", "<a_1><b_2>", "1", "<a_3>", "1,", ",1", " 1,2", "x"]), max_size=3)
)
def test_a_block_of_texts_is_never_more_lenient_than_one_text(texts: list[str]) -> None:
    found = bulk.codes_of_texts(texts)
    if found is not None:
        assert [tuple(row) for row in found.tolist()] == [parse_sid(text, None) for text in texts]
        assert all(map(is_plain, texts))


@given(st.text("0123,<>ab_ \n", max_size=12))
def test_what_is_plain_can_be_parsed_or_refused_without_a_layout(text: str) -> None:
    found = bulk.codes_of_texts([text])
    try:
        codes = parse_sid(text, None)
    except NotationError:
        assert found is None
    else:
        assert found is None or found.tolist() == [list(codes)]


def test_columns_of_codes() -> None:
    found = bulk.codes_of_columns([["1", "2"], ["3", "4"]])
    assert found is not None
    assert found.tolist() == [[1, 3], [2, 4]]
    for column in (["1", None], ["1", True], ["1", "x"], ["1,2", "3,4"], ["<a_1>", "<a_2>"], []):
        assert bulk.codes_of_columns([["5", "6"][: len(column)], column]) is None


ARROW_INTEGERS = [pa.int8(), pa.uint8(), pa.int16(), pa.int64(), pa.uint64()]


@pytest.mark.parametrize("kind", ARROW_INTEGERS, ids=str)
def test_arrow_columns_of_codes(kind: pa.DataType) -> None:
    part = ParquetPart(pa.record_batch({"code_0": pa.array([1, 2], kind), "code_1": pa.array([3, 100], kind)}))
    found = part.codes(["code_0", "code_1"])
    assert found is not None
    assert found.dtype == np.int32
    assert found.tolist() == [[1, 3], [2, 100]]


@pytest.mark.parametrize(
    "column",
    [pa.array([1, -2]), pa.array([1, None]), pa.array([1, 10**9]), pa.array([1.0, 2.0]), pa.array(["1", "2"])],
    ids=["negative", "missing", "beyond nine digits", "floats", "texts"],
)
def test_arrow_columns_that_are_left_to_the_careful_reader(column: pa.Array) -> None:
    part = ParquetPart(pa.record_batch({"code_0": pa.array([1, 2]), "code_1": column}))
    assert part.codes(["code_0"]) is not None
    assert part.codes(["code_0", "code_1"]) is None


def test_arrow_columns_of_texts() -> None:
    texts = ["", "ü", "日本", "x"]
    for kind in (pa.string(), pa.large_string()):
        whole = ParquetPart(pa.record_batch({"item_id": pa.array(texts, kind)}))
        found, sliced = whole.texts("item_id"), ParquetPart(whole._batch.slice(1, 2)).texts("item_id")
        assert found is not None
        assert sliced is not None
        assert (found[:], sliced[:]) == (texts, texts[1:3])
        assert sliced.offsets[0] == 0
    numbers = ParquetPart(pa.record_batch({"item_id": pa.array([7, -8], pa.int64())})).texts("item_id")
    assert numbers is not None
    assert numbers[:] == ["7", "-8"]
    for other in (pa.array(["x", None]), pa.array([1.5]), pa.array([True]), pa.array([b"x"])):
        assert ParquetPart(pa.record_batch({"item_id": other})).texts("item_id") is None


CELL = st.sampled_from(["0,1", "2,3", "0,12", "2", "2,3,4", "<a_1><b_2>", "x", ""])
ITEMS = st.sampled_from(["a", "b", "ü", "", 7, None, 1.5, True]) | st.lists(st.sampled_from(["a", "c", 7]), max_size=3)


def outcome(path: Path) -> object:
    try:
        catalog = load_catalog(path, None)
    except CatalogError as error:
        return str(error)
    titles = None if catalog.titles is None else catalog.titles[:]
    return groups(catalog), titles, catalog.duplicates


def both_ways(path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> tuple[object, object]:
    """What reading ``path`` in blocks of ``block`` rows gives, and what reading it row by row gives."""
    with monkeypatch.context() as patch:
        for module in (formats, tables):
            patch.setattr(module, "BLOCK", block)
        in_blocks = outcome(path)
        patch.setattr(formats, "block_of", lambda codes, values: None)
        patch.setattr(tables, "_block", lambda part, columns: None)
        return in_blocks, outcome(path)


@given(entries=st.lists(st.tuples(CELL, ITEMS), min_size=1, max_size=7), block=st.integers(1, 4))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=100)
def test_json_in_blocks_and_row_by_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entries: list[tuple[str, object]], block: int
) -> None:
    path = tmp_path / "c.json"
    path.write_text("{" + ",".join(f"{json.dumps(key)}:{json.dumps(value)}" for key, value in entries) + "}")
    in_blocks, row_by_row = both_ways(path, monkeypatch, block)
    assert in_blocks == row_by_row


@given(
    rows=st.lists(
        st.tuples(st.sampled_from(["a", "b", "ü", ""]), CELL, st.sampled_from(["t", "", None])), min_size=1, max_size=7
    ),
    block=st.integers(1, 4),
    kind=st.sampled_from(["csv", "parquet"]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=100)
def test_tables_in_blocks_and_row_by_row(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: list[tuple[str, str, str | None]],
    block: int,
    kind: str,
) -> None:
    path = tmp_path / "c"
    frame = pd.DataFrame(rows, columns=["item_id", "sid", "title"])
    if kind == "csv":
        frame.to_csv(path, index=False, quoting=1)
    else:
        frame.to_parquet(path)
    in_blocks, row_by_row = both_ways(path, monkeypatch, block)
    assert in_blocks == row_by_row


def test_most_rows_do_go_through_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("a well-formed file was read row by row")

    monkeypatch.setattr(formats.RowBuilder, "add", refuse)
    path = tmp_path / "c"
    path.write_text('{"1,2": "x", "3,4": ["ü", 5]}')
    with pytest.raises(AssertionError, match="row by row"):
        load_catalog(path, None)  # a block mixes single items and lists
    path.write_text('{"1,2": ["x"], "3,4": ["ü", 5]}')
    assert load_catalog(path, None).num_items == 3
    path.write_text("item_id,title,code_0\nx,t,1\ny,,2\n")
    assert load_catalog(path, None).num_items == 2
