"""Every catalog format of the specification, read from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sid_files import GROUPS, SPELLINGS, Groups, groups, joined, make_layout, rows, write

from flashrec.errors import CatalogError
from flashrec.sid.catalog import assemble, load_catalog
from flashrec.sid.codes import Packing
from flashrec.sid.layout import SidLayout
from flashrec.sid.peek import peek_depth
from flashrec.sid.rows import Rows
from flashrec.sid.sorting import sort_rows
from flashrec.sid.strings import StringTable


@pytest.mark.parametrize("wrapping", [{}, {"bom": True}, {"crlf": True}, {"zipped": True, "bom": True, "crlf": True}])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_format_says_the_same(tmp_path: Path, spelling: str, wrapping: dict[str, bool]) -> None:
    path = write(tmp_path / "catalog", SPELLINGS[spelling], **wrapping)
    catalog = load_catalog(path, make_layout(8, 8, 16))
    assert groups(catalog) == GROUPS
    assert catalog.sids.dtype == catalog.item_start.dtype == np.int32
    assert (catalog.depth, catalog.num_sids, catalog.num_items) == (3, 3, 5)
    assert catalog.has_end_level == (spelling == "commas with an end level")
    plain = load_catalog(write(tmp_path / "plain", SPELLINGS["commas"]), None)
    assert catalog.digest == plain.digest
    assert peek_depth(path) == (4 if catalog.has_end_level else 3)
    if catalog.titles is not None:
        assert catalog.titles[:] == [f"title of {item}" for item in catalog.items]


ITEMS = st.lists(st.text(st.sampled_from("ab0 üß\x7f,[]\u2028😀"), min_size=1, max_size=5), min_size=1, max_size=3)
ODD = st.lists(st.text(st.sampled_from('a"\\\n\x1f\t/é'), min_size=1, max_size=3), min_size=1, max_size=2)


@settings(deadline=None)
@given(
    st.lists(ITEMS | ODD, min_size=1, max_size=12) | st.lists(ITEMS.map(lambda some: some[:1]), min_size=1), st.data()
)
def test_items_as_json_are_what_their_strings_are_written_as(lists: list[list[str]], data: st.DataObject) -> None:
    codes = np.array([[row // 8, row % 8] for row, items in enumerate(lists) for _ in items], dtype=np.int32)
    items = [item for some in lists for item in some]
    numbers = np.arange(len(items), dtype=np.int32)
    catalog = assemble(Path("x"), Rows(codes, StringTable.of(items), None, numbers), has_end_level=False)
    ranks = data.draw(st.lists(st.integers(0, catalog.num_sids - 1), max_size=20))
    found = catalog.items_json(np.array(ranks, dtype=np.int32))
    wanted = [list(dict.fromkeys(lists[rank])) for rank in ranks]
    assert [found.opening + value + found.closing for value in found.values] == list(map(orjson.dumps, wanted))
    assert catalog.items_of_all(np.array(ranks, dtype=np.int32)) == list(map(tuple, wanted))
    assert catalog.plain_items == all(orjson.dumps(item) == f'"{item}"'.encode() for item in items)


@pytest.mark.parametrize("columns", [False, True])
def test_parquet(tmp_path: Path, columns: bool) -> None:
    pairs = rows(GROUPS)
    frame = pd.DataFrame({"item_id": [item for _, item in pairs], "title": ["x", None, "z", "", "ß"]})
    if columns:
        for level in range(3):
            frame[f"code_{level}"] = np.array([sid[level] for sid, _ in pairs], dtype=np.int16)
    else:
        frame["sid"] = [joined(sid) for sid, _ in pairs]
    path = tmp_path / "catalog.bin"
    frame.to_parquet(path)
    catalog = load_catalog(path, make_layout(8, 8, 16))
    assert groups(catalog) == GROUPS
    assert peek_depth(path) == 3
    assert catalog.titles is not None
    titles = dict(zip((item for _, item in pairs), ["x", "", "z", "", "ß"], strict=True))
    assert catalog.titles[:] == [titles[item] for item in catalog.items]


def test_parquet_with_integer_item_ids(tmp_path: Path) -> None:
    path = tmp_path / "catalog.parquet"
    pd.DataFrame({"item_id": [30, 20], "code_0": [1, 0]}).to_parquet(path)
    assert groups(load_catalog(path, None)) == {(0,): ["20"], (1,): ["30"]}


def test_json_items_may_be_single_and_integers(tmp_path: Path) -> None:
    path = write(tmp_path / "catalog.json", '{"1, 2": 7, "0,5": ["x", 8]}')
    assert groups(load_catalog(path, None)) == {(0, 5): ["x", "8"], (1, 2): ["7"]}


def test_one_level_of_codes_is_not_taken_for_packed_integers(tmp_path: Path) -> None:
    path = write(tmp_path / "catalog.json", '{"5": "x", "3": ["y"]}')
    assert peek_depth(path) == 1
    assert groups(load_catalog(path, make_layout(6))) == {(3,): ["y"], (5,): ["x"]}


def test_packed_integers_by_their_size_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "catalog.json", '{"9": "x", "67117063": "y"}')
    assert peek_depth(path) == 3
    assert groups(load_catalog(path, None)) == {(0, 0, 9): ["x"], (1, 1, 7): ["y"]}


def test_packed_base_and_depth_are_configurable(tmp_path: Path) -> None:
    path = write(tmp_path / "catalog.json", '{"9": "x", "15": "y"}')
    packing = Packing(base=4, depth=2)
    assert peek_depth(path, packing=packing) == 2
    assert groups(load_catalog(path, None, packing=packing)) == {(2, 1): ["x"], (3, 3): ["y"]}
    with pytest.raises(CatalogError, match=r"row 2: 15 is beyond 1 levels of 10 codes"):
        load_catalog(path, None, packing=Packing(base=10, depth=1))
    sids = write(tmp_path / "catalog.tsv", "item_id\tsid\nx\t9\n")
    assert groups(load_catalog(sids, None, packing=packing)) == {(2, 1): ["x"]}


def test_sids_in_tables_may_be_wrapped_or_codes(tmp_path: Path) -> None:
    text = 'item_id,sid\nx,<|sid_begin|><s_a_1><s_b_2><|sid_end|>\ny,"0,4"\n'
    catalog = load_catalog(write(tmp_path / "catalog.csv", text), make_layout(5, 5))
    assert groups(catalog) == {(0, 4): ["y"], (1, 2): ["x"]}


def test_token_texts_of_an_unknown_family_need_the_layout(tmp_path: Path) -> None:
    layout = SidLayout((np.array([4, 5], np.int32), np.array([9], np.int32)), (("<x0>", "<x1>"), ("<y>",)))
    path = write(tmp_path / "catalog.tsv", "item_id\tsid\nx\t<x1><y>\n")
    assert groups(load_catalog(path, layout)) == {(1, 0): ["x"]}
    with pytest.raises(CatalogError, match="row 1: '<x1><y>' is not a semantic ID"):
        load_catalog(path, None)


def test_quotes_and_na_in_a_table_are_text(tmp_path: Path) -> None:
    text = 'item_id\tsid\ttitle\nNA\t<a_1>\t5.5" x 3"\nnull\t<a_0>\t"say ""hi"""\n'
    catalog = load_catalog(write(tmp_path / "catalog.tsv", text), None)
    assert groups(catalog) == {(0,): ["null"], (1,): ["NA"]}
    assert catalog.titles is not None
    assert catalog.titles[:] == ['say "hi"', '5.5" x 3"']


def test_repeated_rows_are_dropped_and_counted(tmp_path: Path) -> None:
    text = '{"1,1": ["b", "a", "b"], "0,0": "c", "1,1": ["d", "a"]}'
    catalog = load_catalog(write(tmp_path / "catalog.json", text), None)
    assert groups(catalog) == {(0, 0): ["c"], (1, 1): ["b", "a", "d"]}
    assert catalog.duplicates == 2


def test_rank_and_items(tmp_path: Path) -> None:
    catalog = load_catalog(write(tmp_path / "catalog.json", SPELLINGS["commas"]), None)
    queries = np.array([[7, 0, 9], [0, 1, 2], [0, 1, 1], [7, 0, 10], [-1, 0, 0], [9, 9, 9]])
    assert catalog.rank(queries).tolist() == [2, 0, -1, -1, -1, -1]
    assert catalog.rank(np.empty((0, 3), dtype=np.int32)).tolist() == []
    assert catalog.ranks_of_items(["日本", "b", "10"]).tolist() == [0, 2]
    assert catalog.ranks_of_items([]).tolist() == []
    assert catalog.ranks_emptied_by(["10", "c", "ä", "c"]).tolist() == [1]
    assert catalog.ranks_emptied_by(["10", "日本", "b"]).tolist() == [2]
    with pytest.raises(CatalogError, match="no item 'nope' in the catalog"):
        catalog.ranks_of_items(["b", "nope"])


def test_an_item_under_two_sids_is_found_under_both(tmp_path: Path) -> None:
    catalog = load_catalog(write(tmp_path / "catalog.json", '{"0,0": 1, "0,1": 1, "2,2": [1, 2]}'), None)
    assert catalog.ranks_of_items(["1"]).tolist() == [0, 1, 2]
    assert catalog.ranks_emptied_by(["1"]).tolist() == [0, 1]


def test_the_digest_sees_codes_items_and_their_order(tmp_path: Path) -> None:
    texts = ['{"0,1": ["a", "b"]}', '{"0,1": ["b", "a"]}', '{"0,2": ["a", "b"]}', '{"0,1": ["ab"]}']
    digests = {load_catalog(write(tmp_path / "c.json", text), None).digest for text in texts}
    assert len(digests) == len(texts)


@st.composite
def pair_lists(draw: st.DrawFn) -> list[tuple[tuple[int, ...], str]]:
    depth = draw(st.integers(1, 5))
    sid = st.tuples(*[st.integers(0, draw(st.sampled_from([1, 3, 8191])))] * depth)
    item = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1, max_size=4)
    return draw(st.lists(st.tuples(sid, item), min_size=1, max_size=25))


def expected_groups(pairs: list[tuple[tuple[int, ...], str]]) -> Groups:
    out: Groups = {}
    for sid, item in pairs:
        known = out.setdefault(sid, [])
        if item not in known:
            known.append(item)
    return dict(sorted(out.items()))


def write_pairs(
    path: Path,
    pairs: list[tuple[tuple[int, ...], str]],
    spelling: str,
    *,
    titles: bool = False,
    bom: bool = False,
    crlf: bool = False,
    zipped: bool = False,
) -> None:
    """``pairs`` in their order as JSON, CSV, TSV or Parquet."""
    if spelling == "json":
        entries = ",\n".join(f"{json.dumps(','.join(map(str, sid)))}:{json.dumps(item)}" for sid, item in pairs)
        write(path, "{" + entries + "}", bom=bom, crlf=crlf, zipped=zipped)
        return
    frame = pd.DataFrame({"item_id": [item for _, item in pairs], "sid": [",".join(map(str, sid)) for sid, _ in pairs]})
    if titles:
        frame["title"] = [f"名 {item}" for _, item in pairs]
    if spelling == "parquet":
        frame.to_parquet(path)
    else:
        separator = "\t" if spelling == "tsv" else ","
        write(path, frame.to_csv(index=False, quoting=1, sep=separator), bom=bom, crlf=crlf, zipped=zipped)


SPELLED = st.fixed_dictionaries(
    {
        "spelling": st.sampled_from(["json", "parquet", "csv", "tsv"]),
        **dict.fromkeys(["titles", "bom", "crlf", "zipped"], st.booleans()),
    }
)


@given(pairs=pair_lists(), spelled=SPELLED)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_random_pairs_group_like_a_dictionary(
    tmp_path: Path, pairs: list[tuple[tuple[int, ...], str]], spelled: dict[str, Any]
) -> None:
    """One to five levels, repeated rows, non-ASCII ids and titles, Windows line ends, byte-order marks, gzip."""
    path = tmp_path / "catalog"
    depth = len(pairs[0][0])
    write_pairs(path, pairs, **spelled)
    catalog = load_catalog(path, None, sid_sizes=(8192,) * depth)
    expected = expected_groups(pairs)
    assert groups(catalog) == expected
    assert catalog.sids.tolist() == [list(sid) for sid in expected]
    assert catalog.duplicates == len(pairs) - catalog.num_items
    assert catalog.rank(catalog.sids).tolist() == list(range(catalog.num_sids))
    for item in {item for _, item in pairs}:
        holders = [rank for rank, items in enumerate(expected.values()) if item in items]
        assert catalog.ranks_of_items([item]).tolist() == holders
    assert peek_depth(path) == depth
    if catalog.titles is not None:
        assert catalog.titles[:] == [f"名 {item}" for item in catalog.items]
        assert catalog.title_of(catalog.items[0]) == catalog.titles[0]


@given(pairs=pair_lists(), spelled=SPELLED, place=st.integers(1, 25), longer=st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_unequal_depths_are_refused_with_the_row(
    tmp_path: Path, pairs: list[tuple[tuple[int, ...], str]], spelled: dict[str, Any], place: int, longer: bool
) -> None:
    row = min(place, len(pairs))
    sid, item = pairs[row - 1]
    odd = (*sid, 1) if longer or len(sid) == 1 else sid[1:]
    mixed = [*pairs[:row], (odd, item), *pairs[row:]]
    path = tmp_path / "catalog"
    write_pairs(path, mixed, **spelled)
    with pytest.raises(CatalogError) as caught:
        load_catalog(path, None)
    message = f"{path}: row {row + 1}: {len(odd)} codes, but row 1 has {len(sid)}"
    packed = len(sid) == 1 and spelled["spelling"] == "json" and max(sid[0] for sid, _ in pairs) >= 8192
    assert packed or str(caught.value).startswith(message)


@given(st.data(), st.integers(1, 5), st.sampled_from([1, 9, 8191, 2**31 - 1]))
def test_rows_are_sorted_lexicographically_and_stably(data: st.DataObject, depth: int, largest: int) -> None:
    sid = st.tuples(*[st.integers(0, largest)] * depth)
    sids = data.draw(st.lists(sid, min_size=1, max_size=30))
    numbers = np.arange(len(sids), dtype=np.int32)
    rows = Rows(np.array(sids, dtype=np.int32), StringTable.of([]), None, numbers)
    codes, order, is_first = sort_rows(rows)
    expected = sorted(range(len(sids)), key=lambda row: sids[row])
    assert order.tolist() == expected
    assert [tuple(row) for row in codes.tolist()] == [sids[row] for row in expected]
    assert is_first.tolist() == [
        place == 0 or sids[row] != sids[expected[place - 1]] for place, row in enumerate(expected)
    ]
    assert not hasattr(rows, "codes"), "the unsorted codes would be held twice"


def test_parquet_with_the_items_as_index(tmp_path: Path) -> None:
    path = tmp_path / "catalog.parquet"
    frame = pd.DataFrame({"code_0": [1, 0]}, index=pd.Index(["x", "y"], name="item_id"))
    frame.to_parquet(path)
    assert groups(load_catalog(path, None)) == {(0,): ["y"], (1,): ["x"]}
    assert peek_depth(path) == 1


def test_item_strings_by_position_slice_and_iteration(tmp_path: Path) -> None:
    items = load_catalog(write(tmp_path / "catalog.json", SPELLINGS["commas"]), None).items
    expected = ["ä", "b", "c", "10", "日本"]
    assert list(items) == items[:] == [items[position] for position in range(5)] == expected
    assert items[1:4] == expected[1:4]
    assert items[::-2] == expected[::-2]
    assert items[4:2] == []
    assert items[-1] == "日本"
    with pytest.raises(IndexError):
        items[5]


def test_titles_are_those_of_an_item_s_first_row(tmp_path: Path) -> None:
    lines = ["item_id\tsid\ttitle", "b\t1,2,3\tB", "a\t1,2,4\tA", "c\t2,2,3\t"]
    path = tmp_path / "items.tsv"
    path.write_text("\n".join(lines) + "\n")
    catalog = load_catalog(path, None)
    wanted = ["c", "nowhere", "a", "b", "a"]
    assert catalog.titles_of(wanted) == ["", None, "A", "B", "A"] == [catalog.title_of(item) for item in wanted]
    assert catalog.titles_of([]) == []
