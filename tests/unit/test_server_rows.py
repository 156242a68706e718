"""Beams as JSON: what is written column by column is what an object for each beam would be written as."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashrec import Beam, Request, Result, ScoreSpace
from flashrec.request import LazyBeams
from flashrec.runtime.results import WaveBeams
from flashrec.server import openai, sglang
from flashrec.server.rows import Fields, Shape, rows
from flashrec.server.text import TextCodec
from flashrec.sid import Catalog, SidLayout, load_catalog
from flashrec.sid.strings import StringTable

BOOKS = (np.array([9, 4], dtype=np.int32), np.array([3, 8, 5], dtype=np.int32))
LAYOUT = SidLayout(BOOKS, (("<a_0>", "<a_1>"), ("<b_0>", '<b "1"\\>', "<ü\n,>")), begin=1, end=2)
SIDS = {"0,0": ["pen"], "0,2": ["cup, blue", 'the "mug"'], "1,0": ["hat\\"], "1,1": ["té", "jam\x7f", "],["]}


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    path: Path = tmp_path_factory.mktemp("catalog") / "catalog.json"
    path.write_text(json.dumps(SIDS))
    return load_catalog(path, LAYOUT)


def found(
    catalog: Catalog, ranks: Sequence[int], totals: Sequence[float], layout: SidLayout = LAYOUT, **fields: Any
) -> LazyBeams:
    request = Request(input_ids=(1,), n=max(len(ranks), 1), **fields)
    wave = WaveBeams(
        [request], [len(ranks)], np.array(ranks, dtype=np.int32), np.array(totals, dtype=np.float32), catalog, layout
    )
    return wave.lazy(0)


def waves() -> st.SearchStrategy[list[tuple[list[tuple[int, float]], dict[str, Any]]]]:
    """One to three requests of a wave: ranks with sums, and what the request asks for."""
    beams = st.lists(st.tuples(st.integers(0, 3), st.floats(-(2.0**100), 0.0, width=32)), max_size=9)
    fields = st.sampled_from(
        [
            {},
            {"length_penalty": 0.3},
            {"length_penalty": -16.0},
            {"exclude_items": ("jam\x7f", "pen")},
            {"allow_items": ("té",), "allow_sids": ((0, 2),)},
        ]
    )
    return st.lists(st.tuples(beams, fields), min_size=1, max_size=3)


def everything(fields: Fields) -> dict[str, object]:
    return {"constant": "a \ue000 of [no] field", **fields._asdict()}


def choice(fields: Fields) -> dict[str, object]:
    return {"index": fields.number, "text": fields.text, "sglext": openai._extension(fields, "default@7")}


def only_the_number(fields: Fields) -> object:
    return {"n": fields.number}


def test_the_fields_of_two_beams_as_they_should_be_written(catalog: Catalog) -> None:
    beams = found(catalog, [3, 1], [-0.75, -1.5])
    first, second = rows(beams, TextCodec(None, LAYOUT), everything, first=5)
    assert json.loads(first) == {
        "constant": "a \ue000 of [no] field",
        "number": 5,
        "token_ids": [4, 8, 2],
        "last": 2,
        "text": '<a_1><b "1"\\>',
        "cumulative_logprob": -0.75,
        "score": -0.25,
        "sid": [1, 1],
        "items": ["té", "jam\x7f", "],["],
        "finish_reason": "stop",
    }
    assert json.loads(second)["number"] == 6
    assert json.loads(second)["text"] == "<a_0><ü\n,>"
    assert json.loads(second)["items"] == ["cup, blue", 'the "mug"']


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    waves(),
    st.sampled_from([everything, choice, sglang._beam, only_the_number]),
    st.booleans(),
    st.integers(0, 1000),
    st.data(),
)
def test_columns_are_written_as_objects_are(
    catalog: Catalog,
    requests: list[tuple[list[tuple[int, float]], dict[str, Any]]],
    shape: Shape,
    ends: bool,
    first: int,
    data: st.DataObject,
) -> None:
    layout = LAYOUT if ends else SidLayout(LAYOUT.codebooks, LAYOUT.texts)
    flat = [beam for beams, _ in requests for beam in beams]
    wave = WaveBeams(
        [Request(input_ids=(1,), **fields) for _, fields in requests],
        [len(beams) for beams, _ in requests],
        np.array([rank for rank, _ in flat], dtype=np.int32),
        np.array([total for _, total in flat], dtype=np.float32),
        catalog,
        layout,
    )
    codec = TextCodec(None, layout)
    for index in data.draw(st.permutations(range(len(requests)))):
        lazy = wave.lazy(index)
        written = rows(lazy, codec, shape, first=first)
        assert len(written) == len(lazy) == len(requests[index][0])
        assert written == rows(tuple(lazy), codec, shape, first=first)


def test_semantic_ids_of_one_code(tmp_path: Path) -> None:
    layout = SidLayout((BOOKS[1],), (LAYOUT.texts[1],))
    (tmp_path / "catalog.json").write_text(json.dumps({"0": ["pen"], "2": ["cup"]}))
    beams = found(load_catalog(tmp_path / "catalog.json", layout), [1, 0], [-1.0, -2.0], layout)
    first, second = map(json.loads, rows(beams, TextCodec(None, layout), sglang._beam))
    assert (first["output_ids"], first["text"], first["meta_info"]["sid"]) == ([5], "<ü\n,>", [2])
    assert (second["output_ids"], second["meta_info"]["items"]) == ([3], ["pen"])


def test_a_field_that_lacks_a_beam_is_an_error(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TextCodec, "quoted", lambda self, sids: [b"one"])
    with pytest.raises(RuntimeError, match="2 beams have a field of 1 values"):
        rows(found(catalog, [3, 1], [-0.75, -1.5]), TextCodec(None, LAYOUT), everything)


def test_a_float32_is_written_with_all_its_digits(catalog: Catalog) -> None:
    total = float(np.float32(-0.1))
    (row,) = rows(found(catalog, [0], [total]), TextCodec(None, LAYOUT), everything)
    assert str(total).encode() in row  # -0.10000000149011612, not -0.1
    assert json.loads(row)["cumulative_logprob"] == total


def test_beams_of_no_catalog_are_written_one_by_one() -> None:
    free = (Beam((7, 8), -1.0, -0.5, "length"), Beam((9,), -2.0, -2.0, "stop"), Beam((), -3.0, -3.0, "length"))
    written = [json.loads(row) for row in rows(free, TextCodec(None, None), sglang._beam)]
    assert [row["meta_info"]["finish_reason"] for row in written] == [
        {"type": "length", "length": 2},
        {"type": "stop", "matched": 9},
        {"type": "length", "length": 0},
    ]
    assert all("sid" not in row["meta_info"] for row in written)


def test_counting_beams_and_tokens_makes_no_objects(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = found(catalog, [3, 1, 0], [-1.0, -2.0, -3.0])
    whole = Result("r", tuple(lazy), 3, 0, ScoreSpace.SID)
    monkeypatch.setattr(WaveBeams, "beams_of", None)
    result = Result("r", found(catalog, [3, 1, 0], [-1.0, -2.0, -3.0]), 3, 0, ScoreSpace.SID)
    assert (len(result.beams), result.completion_tokens) == (3, 9)
    assert (len(whole.beams), whole.completion_tokens) == (3, 9)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), min_size=1), st.data())
def test_strings_are_picked_in_the_order_asked_for(texts: list[str], data: st.DataObject) -> None:
    table = StringTable.of(texts)
    places = data.draw(st.lists(st.integers(0, len(texts) - 1), max_size=12))
    assert table.pick(np.array(places, dtype=np.int32)) == [texts[place] for place in places]


def test_an_answer_holds_the_first_beam_twice_and_each_of_the_others_once(catalog: Catalog) -> None:
    result = Result("r", found(catalog, [3, 1], [-0.75, -1.5]), 3, 2, ScoreSpace.SID, "default@1")
    answer = orjson.loads(orjson.dumps(sglang._answer(TextCodec(None, LAYOUT), "x", sglang.SamplingParams(), result)))
    first, second = answer["meta_info"].pop("beam_results")
    assert answer == first
    assert first["output_ids"] == [4, 8, 2]
    assert second["output_ids"] == [9, 5, 2]
    assert first["meta_info"]["sid"] == [1, 1]
    assert first["meta_info"]["completion_tokens"] == 6
    assert first["meta_info"]["cached_tokens"] == 2
    assert "id" not in second["meta_info"]
