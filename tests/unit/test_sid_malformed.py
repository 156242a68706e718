"""Malformed catalogs: one line with file, row and reason, and never anything but a :class:`CatalogError`."""

from __future__ import annotations

import gzip
import json
import random
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sid_files import SPELLINGS
from sid_refusals import LAYOUT, read_or_refuse, refusal

from flashrec.errors import CatalogError
from flashrec.sid.catalog import load_catalog
from flashrec.sid.peek import peek_depth


@pytest.mark.parametrize("content", ["", "  \n \n", "\ufeff", "{}", " { } ", "item_id\tsid\n"])
def test_an_empty_file(tmp_path: Path, content: str) -> None:
    assert refusal(tmp_path / "c", content) == "the catalog is empty"


def test_an_empty_gzip_and_a_cut_one(tmp_path: Path) -> None:
    assert refusal(tmp_path / "c", gzip.compress(b"")) == "the catalog is empty"
    whole = gzip.compress(SPELLINGS["commas"].encode())
    assert refusal(tmp_path / "c", whole[:-12]).startswith("broken gzip file")
    assert refusal(tmp_path / "c", whole[:2] + b"junk").startswith("broken gzip file")


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match=r"gone.json: cannot read the catalog: No such file"):
        load_catalog(tmp_path / "gone.json", LAYOUT)
    with pytest.raises(CatalogError, match=r"cannot read the catalog: Is a directory"):
        peek_depth(tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (
            '{"1,2,3": "x", "1,2": "y"}',
            "row 2: 2 codes, but row 1 has 3: all semantic IDs of a catalog need one depth",
        ),
        ('{"1,2,3": "x", "1,2,99": "y"}', "row 2: level 2 has codes 0 to 15, not 99"),
        ('{"1,2": "x"}', "row 1: 2 codes per SID, but the layout has 3 levels"),
        ('{"1,2,3,4,5": "x"}', "row 1: 5 codes per SID, but the layout has 3 levels"),
        (
            '{"1,2,3,1": "x", "1,2,4,0": "y"}',
            "row 2: 4 codes per SID, .* no end level: it is 0 here and 1 in row 1",
        ),
        ('{"1,2,3,5": "x"}', "row 1: 4 codes per SID, .* no end level: it is 5 here"),
        ('{"1,2,3": "x", "1,two,3": "y"}', "row 2: '1,two,3' is not a list of codes"),
        ('{"1,2,3": "x", "1,-2,3": "y"}', "row 2: '1,-2,3' is not a list of codes"),
        ('{"1,2,3": "x", "1,2,": "y"}', "row 2: '1,2,' is not a list of codes"),
        ('{"1,2,3": "x", "": "y"}', "row 2: the semantic ID is empty"),
        ('{"1,2,3": "x", "1,2,9999999999": "y"}', "row 2: '1,2,9999999999' is not a list of codes"),
        ('{"1,2,3": []}', "row 1: the semantic ID names no item"),
        ('{"1,2,3": null}', "row 1: an item id is a string or an integer, not a JSON null"),
        ('{"1,2,3": [1.5]}', "row 1: an item id is a string or an integer, not a JSON float"),
        ('{"1,2,3": NaN}', "row 1: an item id is a string or an integer, not a JSON float"),
        ('{"1,2,3": true}', "row 1: an item id is a string or an integer, not a JSON bool"),
        ('{"1,2,3": [["x"]]}', "row 1: an item id is a string or an integer, not a JSON list"),
        ('{"1,2,3": ["x", ""]}', "row 1: the item id is empty"),
        ('{"1,2,3": {"name": "x"}}', "row 1: an item record needs one of pid, iid, item_id"),
        ('{"1,2,3": "\\ud800"}', "row 1: .* half of a character"),
        ('["1,2,3"]', "a catalog is a JSON object, not a JSON list"),
        ('{"1,2,3": "x",}', "line 1 column 15: not JSON"),
        ('{"1,2,3": "x"', "line 1 column 14: not JSON"),
        ('{"1,2,3": ' + "[" * 100_000, "the JSON is nested too deeply"),
        ('{"1,2,3": ' + "1" * 5000 + "}", "not a JSON catalog: Exceeds the limit"),
        (b'{"1,2,3": "\xff"}', "line 1: byte 0xff is not UTF-8"),
        (b'\n{"1,2,3":\n "\xe4"}', "line 3: byte 0xe4 is not UTF-8"),
    ],
)
def test_json(tmp_path: Path, content: str | bytes, reason: str) -> None:
    assert re.match(reason, refusal(tmp_path / "c.json", content))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"i": ["<a_1>", "<b_2>", "<c_3>"], "j": ["<a_1>", "<b_2>"]}', "row 2: 2 codes, but row 1 has 3"),
        (
            '{"i": ["<a_1>", "<b_2>", "<c_3>"], "j": ["<a_1>", "<c_3>", "<b_2>"]}',
            "row 2: item 'j': .* has level 'c'",
        ),
        (
            '{"i": ["<a_1>", "<b_2>", "<c_3>"], "j": ["<a_1>", "<b_2>", "<c_16>"]}',
            "row 2: level 2 has codes 0 to 15",
        ),
        (
            '{"i": ["<a_1>", "<b_2>", "<c_3>"], "j": ["<x>"]}',
            "row 2: item 'j': '<x>' has no token of level 0",
        ),
        ('{"i": ["<a_1>", "<b_2>", "<c_3>"], "j": []}', "row 2: item 'j': a list of token texts is needed"),
        (
            '{"i": ["<a_1>", "<b_2>", "<c_3>"], "j": "<a_1>"}',
            "row 2: item 'j': a list of token texts is needed",
        ),
        ('{"i": ["<a_1>", "<b_2>", "<c_3>"], "j": {"a": 1}}', "row 2: item 'j': .* not a JSON object"),
        ('{"": ["<a_1>", "<b_2>", "<c_3>"]}', "row 1: the item id is empty"),
    ],
)
def test_index(tmp_path: Path, content: str, reason: str) -> None:
    assert re.match(reason, refusal(tmp_path / "c.index.json", content))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"5": [{"pid": 1}], "1,2": [{"pid": 2}]}', "row 2: '1,2' is not a packed semantic ID"),
        ('{"5": [{"pid": 1}], "-5": [{"pid": 2}]}', "row 2: '-5' is not a packed semantic ID"),
        (
            '{"5": [{"pid": 1}], "549755813888": [{"pid": 2}]}',
            "row 2: 549755813888 is beyond 3 levels of 8192 codes",
        ),
        ('{"5": [{"pid": 1}], "536870912": [{"pid": 2}]}', "row 2: level 0 has codes 0 to 7, not 8"),
        ('{"5": [{"count": 1}]}', "row 1: an item record needs one of pid, iid, item_id"),
        ('{"5": [{"pid": {"pid": 1}}]}', "row 1: an item id is a string or an integer, not a JSON object"),
    ],
)
def test_packed(tmp_path: Path, content: str, reason: str) -> None:
    assert re.match(reason, refusal(tmp_path / "sid2pid.json", content))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("item_id\tcode\nx\t1\n", "a table needs the columns item_id and either sid or code_0"),
        ("name,sid\nx,1\n", "a table needs the columns item_id and .* found 'name', 'sid'"),
        ("hello world\n", "a table needs the columns item_id and"),
        ("item_id\tsid\tcode_0\nx\t<a_1>\t1\n", "the table has both sid and code_0"),
        ("item_id\tcode_0\tcode_2\nx\t1\t2\n", "column code_1 is missing, code_2 is there"),
        ("item_id\tcode_1\nx\t1\n", "column code_0 is missing, code_1 is there"),
        ("item_id\tsid\tsid\nx\t<a_1>\t<a_1>\n", "a column name occurs twice"),
        (
            "item_id,sid\nx,<a_1><b_2><c_3>\ny,<a_1><b_2><c_3>,z\n",
            "not a table: .*Expected 2 fields in line 3, saw 3",
        ),
        ("item_id\tsid\nx\t<a_1><b_2><c_3>\ny\n", "row 2: the semantic ID is empty"),
        ("item_id\tsid\nx\t<a_1><b_2><c_3>\n\t<a_1><b_2><c_3>\n", "row 2: the item id is empty"),
        (
            "item_id\tsid\nx\t<a_1><b_2><c_3>\ny\t<a_1><c_3>\n",
            "row 2: '<a_1><c_3>' has level 'c' where 'b' belongs",
        ),
        ("item_id\tsid\nx\t<a_1><b_2><c_3>\ny\t\n", "row 2: the semantic ID is empty"),
        (
            "item_id\tsid\nx\t<a_1><b_2><c_3>\ny\t<a_1><b_2><c_99>\n",
            "row 2: level 2 has codes 0 to 15, not 99",
        ),
        ("item_id\tcode_0\tcode_1\tcode_2\nx\t1\t2\t3\ny\t1\t2\t3.0\n", "row 2: code_2 is '3.0', not a code"),
        ("item_id\tcode_0\tcode_1\tcode_2\nx\t1\t2\t3\ny\t1\t\t3\n", "row 2: code_1 is '', not a code"),
        (
            'item_id\tsid\ttitle\nx\t<a_1><b_2><c_3>\t"open\ny\t<a_1><b_2><c_3>\tb"\n',
            "row 1: a quote at the start",
        ),
        ('item_id\tsid\ttitle\nx\t<a_1><b_2><c_3>\t"open\n', "not a table: .*EOF inside string"),
        (b"item_id\tsid\nx\xff\t<a_1><b_2><c_3>\n", "line 2: byte 0xff is not UTF-8"),
    ],
)
def test_text_tables(tmp_path: Path, content: str | bytes, reason: str) -> None:
    assert re.match(reason, refusal(tmp_path / "c.tsv", content))


def test_row_numbers_pass_over_blank_lines(tmp_path: Path) -> None:
    content = "item_id\tcode_0\tcode_1\tcode_2\n\nx\t1\t2\t3\n\n\ny\t1\t2\tc\n"
    assert refusal(tmp_path / "c.tsv", content).startswith("row 2: code_2")


@given(spelling=st.sampled_from(sorted(SPELLINGS)), seed=st.integers(0, 2**32))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=100)
def test_damaged_files_end_in_an_error_or_a_catalog(tmp_path: Path, spelling: str, seed: int) -> None:
    chance = random.Random(seed)
    data = bytearray(SPELLINGS[spelling].encode())
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data))
        damage = chance.choice(["flip", "cut", "insert", "double", "quote"])
        if damage == "flip":
            data[at] = chance.randrange(256)
        elif damage == "cut":
            del data[at : at + chance.randint(1, 20)]
        elif damage == "insert":
            data[at:at] = bytes(chance.randrange(256) for _ in range(3))
        elif damage == "double":
            data[at:at] = data[at : at + 30]
        else:
            data[at:at] = chance.choice([b'"', b"\r", b"\n", b"\t", b",", b"\0", b"{", b"["])
        data = data or bytearray(b"x")
    path = tmp_path / "c"
    path.write_bytes(bytes(data))
    read_or_refuse(path)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just("<a_1>"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.dictionaries(
        st.sampled_from(["1,2,3", "4,5,6", "1,2", "7", "99999", "x", ""]) | st.text(max_size=5), JSON_VALUES
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_json_object_ends_in_an_error_or_a_catalog(tmp_path: Path, document: dict[str, object]) -> None:
    path = tmp_path / "c"
    path.write_text(json.dumps(document))
    read_or_refuse(path)


@given(st.binary(max_size=60))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_bytes_end_in_an_error_or_a_catalog(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "c"
    path.write_bytes(data)
    read_or_refuse(path)
