"""Malformed Parquet and gzip files: damaged bytes, columns of any type, and nothing but a one-line error."""

from __future__ import annotations

import datetime
import decimal
import gzip
import random
import re
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sid_files import SPELLINGS
from sid_refusals import read_or_refuse, refusal

from flashrec.errors import CatalogError
from flashrec.sid.peek import peek_depth


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"item_id": ["x", None], "sid": ["<a_1><b_2><c_3>"] * 2}, "row 2: item_id is missing"),
        (
            {"item_id": [1.5, 2.5], "sid": ["<a_1><b_2><c_3>"] * 2},
            "row 1: item_id is '1.5', a float, not a string",
        ),
        ({"item_id": ["x", "y"], "sid": ["<a_1><b_2><c_3>", None]}, "row 2: sid is missing"),
        (
            {"item_id": ["x"], "code_0": [-1], "code_1": [0], "code_2": [0]},
            "row 1: code_0 is '-1', not a code",
        ),
        (
            {"item_id": ["x"], "code_0": [[1]], "code_1": [0], "code_2": [0]},
            "row 1: code_0 is .* not a string",
        ),
        ({"item_id": ["x"], "sid": ["<a_1><b_2><c_3>"], "title": [7.5]}, "row 1: title is '7.5', a float"),
        ({"other": [1]}, "a table needs the columns"),
        ({"item_id": [], "sid": []}, "the catalog is empty"),
    ],
)
def test_parquet(tmp_path: Path, columns: dict[str, list[object]], reason: str) -> None:
    source = tmp_path / "source"
    pd.DataFrame(columns).to_parquet(source)
    assert re.match(reason, refusal(tmp_path / "c.parquet", source.read_bytes()))


def test_a_cut_parquet_file(tmp_path: Path) -> None:
    source = tmp_path / "source"
    pd.DataFrame({"item_id": ["x"], "sid": ["<a_1><b_2><c_3>"]}).to_parquet(source)
    assert refusal(tmp_path / "c", source.read_bytes()[:-9]).startswith("broken Parquet file: ")
    assert refusal(tmp_path / "c", b"PAR1").startswith("broken Parquet file: ")


@pytest.mark.parametrize(
    "column",
    [
        pa.array([datetime.datetime(2026, 1, 1)] * 2),
        pa.array([2**62] * 2, pa.timestamp("ms")),
        pa.array([decimal.Decimal("1.5")] * 2),
        pa.array([b"x", b"\xff"]),
        pa.array([{"a": 1}] * 2),
        pa.array([["x"], None]),
        pa.array([None, None]),
        pa.array([True, False]),
        pa.array([float("nan")] * 2),
        pa.array(["", ""]),
        pa.array(["x", "y"]).dictionary_encode(),
        pa.array([2**64 - 1] * 2, pa.uint64()),
        pa.chunked_array([["x"], ["y"]]),
    ],
    ids=lambda column: str(column.type),
)
@pytest.mark.parametrize("name", ["item_id", "sid", "code_0", "title"])
def test_parquet_columns_of_any_type(tmp_path: Path, name: str, column: pa.Array) -> None:
    columns = {"item_id": pa.array(["x", "y"]), "title": pa.array(["s", "t"]), name: column}
    if name not in ("sid", "code_0"):
        columns["code_0"] = pa.array([1, 2])
    path = tmp_path / "c.parquet"
    pq.write_table(pa.table(columns), path)
    read_or_refuse(path)


def test_parquet_text_that_is_not_utf8(tmp_path: Path) -> None:
    text = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")])
    pq.write_table(pa.table({"item_id": text, "code_0": pa.array([1])}), tmp_path / "source")
    assert "UTF8" in refusal(tmp_path / "c", (tmp_path / "source").read_bytes())


def test_a_parquet_file_that_lost_its_row_groups(
    tmp_path: Path, parquet_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its footer may count rows that no row group holds."""
    monkeypatch.setattr("flashrec.sid.parquet.parquet_parts", lambda data, rows: iter(()))
    assert refusal(tmp_path / "c", parquet_bytes) == "the catalog is empty"
    with pytest.raises(CatalogError, match="the catalog is empty"):
        peek_depth(tmp_path / "c")


@pytest.fixture(scope="module")
def parquet_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("parquet") / "c"
    frame = pd.DataFrame(
        {"item_id": ["x", "ü", "z"], "title": ["", "t", "日本"], "code_0": [1, 2, 3], "code_1": [0, 0, 7]}
    )
    frame.to_parquet(path)
    return path.read_bytes()


@given(seed=st.integers(0, 2**32), zipped=st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
@pytest.mark.timeout(120)
def test_damaged_binary_files_end_in_an_error_or_a_catalog(
    tmp_path: Path, parquet_bytes: bytes, seed: int, zipped: bool
) -> None:
    chance = random.Random(seed)
    data = bytearray(gzip.compress(SPELLINGS["commas"].encode()) if zipped else parquet_bytes)
    for _ in range(chance.randint(1, 6)):
        at = chance.randrange(2, len(data))
        if chance.random() < 0.2:
            del data[at : at + chance.randint(1, 40)]
        else:
            data[at] = chance.randrange(256)
    path = tmp_path / "c"
    path.write_bytes(bytes(data))
    read_or_refuse(path)
