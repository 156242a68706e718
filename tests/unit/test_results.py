"""From packed rows and banks to ranked beams (SPEC B1, B1a, B5, B7, S5)."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashrec import Beam, Request, Result, ScoreSpace
from flashrec.errors import NonFiniteError, RequestError
from flashrec.runtime.buffers import WaveLayout
from flashrec.runtime.member import Member, WaveKey, validate
from flashrec.runtime.results import catalog_results, free_results, pack_frontier, penalised, unpack_frontier
from flashrec.search.expand import Frontier
from flashrec.search.filters import VisibleItems, resolve_filter
from flashrec.search.free import Bank
from flashrec.sid import Catalog, SidLayout, load_catalog

LAYOUT = SidLayout(
    codebooks=(np.array([9, 4], dtype=np.int32), np.array([3, 8, 5], dtype=np.int32)),
    texts=(("<a_0>", "<a_1>"), ("<b_0>", "<b_1>", "<b_2>")),
    begin=1,
    end=2,
)
OPEN_LAYOUT = SidLayout(LAYOUT.codebooks, LAYOUT.texts)
SIDS = {"0,0": ["pen"], "0,2": ["cup", "mug"], "1,0": "hat", "1,1": ["tea", "jam", "rye"]}
F32 = np.float32


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    path: Path = tmp_path_factory.mktemp("catalog") / "catalog.json"
    path.write_text(json.dumps(SIDS))
    return load_catalog(path, LAYOUT)


def member(n: int, width: int, **fields: Any) -> Member:
    request = Request(input_ids=(1, 2, 3), n=n, rid=f"r{n}", **fields)
    key = WaveKey(True, ScoreSpace.SID, 2)
    return Member(request, np.array([1, 2, 3], dtype=np.int32), width, key, (), None, cached=2)


def frontier(rows: list[tuple[int, float, bool]]) -> Frontier:
    node, score, valid = zip(*rows, strict=True)
    return Frontier(torch.tensor(node, dtype=torch.int32), torch.tensor(score), torch.tensor(valid))


def results(
    members: list[Member], rows: list[tuple[int, float, bool]], catalog: Catalog, layout: SidLayout = LAYOUT
) -> list[Result | NonFiniteError]:
    widths = tuple(one.width for one in members)
    starts = tuple(sum(widths[:index]) for index in range(len(widths)))
    host = unpack_frontier(pack_frontier(frontier(rows)))
    return catalog_results(members, WaveLayout(widths, starts, 1), host, catalog, layout)


def beams(result: Result | NonFiniteError) -> tuple[Beam, ...]:
    assert isinstance(result, Result)
    return tuple(result.beams)


@given(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(width=32), st.booleans()), min_size=1, max_size=9))
def test_packing_keeps_every_bit(rows: list[tuple[int, float, bool]]) -> None:
    packed = pack_frontier(frontier(rows))
    assert packed.dtype is torch.int32
    host = unpack_frontier(packed)
    assert host.rank.tolist() == [rank for rank, _, _ in rows]
    assert host.score.tobytes() == np.array([score for _, score, _ in rows], dtype=F32).tobytes()
    assert host.valid.tolist() == [valid for _, _, valid in rows]


def test_rows_become_beams(catalog: Catalog) -> None:
    rows = [(3, -0.75, True), (1, -1.5, True), (0, -2.0, True), (2, -3.0, True)]
    (result,) = results([member(3, 4)], rows, catalog)
    assert isinstance(result, Result)
    assert (result.rid, result.prompt_tokens, result.cached_tokens) == ("r3", 3, 2)
    assert beams(result) == (
        Beam((4, 8, 2), -0.75, -0.25, "stop", (1, 1), ("tea", "jam", "rye")),
        Beam((9, 5, 2), -1.5, -0.5, "stop", (0, 2), ("cup", "mug")),
        Beam((9, 3, 2), -2.0, float(F32(-2.0 / 3)), "stop", (0, 0), ("pen",)),
    )


def test_without_an_end_token_none_is_emitted(catalog: Catalog) -> None:
    ((one,),) = map(beams, results([member(1, 1)], [(2, -3.0, True)], catalog, OPEN_LAYOUT))
    assert (one.token_ids, one.score) == ((4, 3), -1.5)


def test_each_request_gets_its_own_rows_and_no_padding(catalog: Catalog) -> None:
    rows = [(0, -1.0, True), (7, 9.0, False), (3, -2.0, True), (2, -4.0, True), (9, 5.0, False), (1, -1.0, True)]
    found = results([member(2, 2), member(4, 4), member(1, 1)], [*rows[:5], rows[1], rows[5]], catalog)
    assert [[beam.sid for beam in beams(result)] for result in found] == [[(0, 0)], [(1, 1), (1, 0)], [(0, 2)]]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_scores_that_are_not_finite_fail_their_request_alone(catalog: Catalog, bad: float) -> None:
    rows = [(0, -1.0, True), (1, bad, True), (2, -1.0, True)]
    broken, sound = results([member(2, 2), member(1, 1)], rows, catalog)
    assert isinstance(broken, NonFiniteError)
    assert "'r2'" in str(broken)
    assert [beam.sid for beam in beams(sound)] == [(1, 0)]
    rows[1] = (1, bad, False)
    assert len(beams(results([member(2, 2), member(1, 1)], rows, catalog)[0])) == 1


def test_samples_are_ranked_by_score_and_cut_after_that(catalog: Catalog) -> None:
    rows = [(0, -3.0, True), (1, -1.0, True), (2, -2.0, True), (3, -1.0, True)]
    (drawn,) = results([member(3, 4, temperature=1.0)], rows, catalog)
    assert [beam.sid for beam in beams(drawn)] == [(0, 2), (1, 1), (1, 0)]
    (ranked,) = results([member(3, 4)], rows, catalog)
    assert [beam.sid for beam in beams(ranked)] == [(0, 0), (0, 2), (1, 0)]


def test_beams_are_built_when_looked_at_and_equal_any_sequence(catalog: Catalog) -> None:
    one, other = (results([member(2, 2)], [(0, -1.0, True), (1, -2.0, True)], catalog)[0] for _ in range(2))
    assert isinstance(one, Result)
    assert isinstance(other, Result)
    assert one == other
    assert one.beams == list(other.beams)
    assert one.beams != other.beams[:1]
    assert one.beams[1].sid == (0, 2)
    assert hash(one.beams) == hash(other.beams)


@given(st.integers(1, 64), st.floats(-16, 16), st.floats(-500, 0, width=32))
def test_penalty_is_float64_rounded_once(length: int, penalty: float, total: float) -> None:
    (found,) = penalised(np.array([total], dtype=F32), np.array([length], dtype=np.int32), penalty)
    assert found == F32(float(F32(total)) / float(length) ** penalty)
    assert np.isfinite(found)


@pytest.mark.parametrize(
    ("fields", "sid", "visible"),
    [
        ({}, (1, 1), ("tea", "jam", "rye")),
        ({"exclude_items": ("jam",)}, (1, 1), ("tea", "rye")),
        ({"allow_items": ("rye", "cup")}, (1, 1), ("rye",)),
        ({"allow_items": ("rye",), "exclude_items": ("tea",)}, (1, 1), ("rye",)),
        ({"allow_sids": ((1, 1),)}, (1, 1), ("tea", "jam", "rye")),
        ({"allow_sids": ((1, 1),), "allow_items": ("cup",)}, (1, 1), ("tea", "jam", "rye")),
        ({"allow_sids": ((1, 1),), "allow_items": ("cup",)}, (0, 2), ("cup",)),
        ({"allow_sids": ((1, 1),), "exclude_items": ("tea",)}, (1, 1), ("jam", "rye")),
    ],
)
def test_items_of_a_sid_that_a_request_may_see(
    catalog: Catalog, fields: dict[str, Any], sid: tuple[int, ...], visible: tuple[str, ...]
) -> None:
    items = catalog.items_of(int(catalog.rank(np.array([sid]))[0]))
    assert VisibleItems(Request(input_ids=(1,), **fields))(sid, items) == visible


@pytest.mark.parametrize(
    ("fields", "sids"),
    [
        ({"allow_items": ("tea", "cup"), "exclude_items": ("tea",)}, [(0, 2)]),
        ({"allow_items": ("tea", "jam"), "exclude_items": ("tea",)}, [(1, 1)]),
        ({"allow_items": ("tea",), "exclude_items": ("tea",)}, []),
        ({"allow_items": ("tea",), "exclude_items": ("jam",)}, [(1, 1)]),
        ({"allow_items": ("tea", "cup"), "exclude_sids": ((1, 1),)}, [(0, 2)]),
        ({"allow_items": ("tea",), "allow_sids": ((1, 1),), "exclude_items": ("tea",)}, [(1, 1)]),
    ],
)
def test_every_sid_that_a_search_may_reach_has_an_item_to_show(
    catalog: Catalog, fields: dict[str, Any], sids: list[tuple[int, ...]]
) -> None:
    request = Request(input_ids=(1,), **fields)
    found = resolve_filter(request, catalog)
    assert found is not None
    assert found.allow
    assert [tuple(catalog.sids[rank].tolist()) for rank in found.ranks] == sids
    for rank in found.ranks:
        assert VisibleItems(request)(tuple(catalog.sids[rank].tolist()), catalog.items_of(int(rank)))


@pytest.mark.parametrize(("allowed", "field"), [(("tea", "soap"), "allow_items"), (("tea",), "exclude_items")])
def test_an_item_that_is_allowed_and_excluded_is_still_looked_up(
    catalog: Catalog, allowed: tuple[str, ...], field: str
) -> None:
    excluded = ("tea",) if field == "allow_items" else ("tea", "soap")
    with pytest.raises(RequestError, match="soap") as error:
        resolve_filter(Request(input_ids=(1,), allow_items=allowed, exclude_items=excluded), catalog)
    assert error.value.field == field


def bank(rows: list[tuple[tuple[int, ...], float, bool, bool]], steps: int = 3) -> Bank:
    """Rows of (tokens, total, filled, stopped)."""
    out = Bank.empty(len(rows), steps, torch.device("cpu"))
    for place, (tokens, total, filled, stopped) in enumerate(rows):
        out.tokens[place, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        out.length[place], out.total[place] = len(tokens), total
        out.filled[place], out.stopped[place] = filled, stopped
    return out


def free(
    n: int, rows: list[tuple[tuple[int, ...], float, bool, bool]], penalty: float = 1.0
) -> Result | NonFiniteError:
    (result,) = free_results([member(n, 4, length_penalty=penalty)], [bank(rows)])
    return result


ROWS = [
    ((5, 6, 7), -3.0, True, False),
    ((8, 2), -2.5, True, True),
    ((4,), -9.0, False, True),
    ((6, 2), -2.0, True, True),
]


def test_finished_hypotheses_are_ranked_by_penalised_score() -> None:
    found = beams(free(3, ROWS))
    # Equal scores: the one that was banked first leads.
    assert [(beam.token_ids, beam.finish_reason) for beam in found] == [
        ((5, 6, 7), "length"),
        ((6, 2), "stop"),
        ((8, 2), "stop"),
    ]
    assert [beam.score for beam in found] == [-1.0, -1.0, -1.25]
    assert [beam.token_ids for beam in beams(free(2, ROWS, penalty=0.0))] == [(6, 2), (8, 2)]
    assert all(beam.sid is None and beam.items == () for beam in found)


def test_an_unfilled_place_may_hold_anything_a_filled_one_must_be_finite() -> None:
    rows = [*ROWS[:2], ((4,), math.nan, False, True)]
    assert len(beams(free(4, rows))) == 2
    assert isinstance(free(4, [*rows, ((1,), -math.inf, True, False)]), NonFiniteError)


def test_a_validated_member_knows_its_emitted_length(catalog: Catalog) -> None:
    from flashrec.runtime.catalogs import ServedCatalog
    from flashrec.runtime.member import Limits, emitted_tokens
    from flashrec.search.levels import trie_levels
    from flashrec.sid import build_trie

    limits = Limits(
        vocab_size=10, max_context=8, max_beam_width=4, max_decode_steps=4, default_space=ScoreSpace.SID,
        eos_token_ids=(),
    )  # fmt: skip
    assert (emitted_tokens(catalog, LAYOUT), emitted_tokens(catalog, OPEN_LAYOUT)) == (3, 2)
    trie = build_trie(catalog.sids, LAYOUT.sizes)
    tries = tuple(trie_levels(trie, torch.device("cpu"), score_end=False, dense_cells=0))
    served = ServedCatalog("shop", 5, catalog, LAYOUT, tries, 0)
    found = validate(Request(input_ids=(7,), max_tokens=3), limits, served)
    assert (found.tokens.tolist(), found.key.steps, found.key.revision, found.width) == ([7, 1], 2, 5, 1)
    assert found.served is served
    open_ended = dataclasses.replace(served, layout=OPEN_LAYOUT)
    assert validate(Request(input_ids=(7,)), limits, open_ended).tokens.tolist() == [7]
