"""Catalog selection against a brute force in plain Python, over small random tries (SPEC B1 to B3, B7, S5)."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tiny_search import HIDDEN, Ask, BruteForce, Hit, World, brute_force, legal_sids, search

from flashrec import ScoreSpace
from flashrec.errors import LayoutError
from flashrec.search import expand as expand_module
from flashrec.search.expand import Frontier
from flashrec.search.filters import LeafFilter
from flashrec.search.levels import head_levels
from flashrec.sid import SidLayout

SPACES = list(ScoreSpace)
FLOAT32_ERROR = 2e-5
"""Of scores up to about 30 over three levels; searches whose float64 scores lie closer are not compared."""


@st.composite
def worlds(draw: st.DrawFn) -> World:
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    codes = st.tuples(*(st.integers(0, size - 1) for size in sizes))
    sids = draw(st.lists(codes, min_size=1, max_size=14, unique=True))
    return World.make(sids, sizes, draw(st.integers(0, 2**16)))


@st.composite
def filters(draw: st.DrawFn, num_sids: int) -> LeafFilter | None:
    kind = draw(st.sampled_from(["none", "allow", "exclude"]))
    if kind == "none":
        return None
    ranks = draw(st.sets(st.integers(0, num_sids - 1)))
    return LeafFilter(np.array(sorted(ranks), dtype=np.int64), allow=kind == "allow")


@st.composite
def asks(draw: st.DrawFn, num_sids: int) -> Ask:
    return Ask(
        prompt=draw(st.integers(0, 9)),
        n=draw(st.sampled_from([1, 2, 3, 5, 20])),
        leaf_filter=draw(filters(num_sids)),
    )


def assert_same(found: list[Hit], wanted: BruteForce) -> None:
    assert [hit.codes for hit in found] == [hit.codes for hit in wanted.hits]
    assert [hit.score for hit in found] == pytest.approx([hit.score for hit in wanted.hits], abs=FLOAT32_ERROR)


def assert_same_bits(one: Frontier, other: Frontier) -> None:
    assert torch.equal(one.node, other.node)
    assert torch.equal(one.valid, other.valid)
    assert torch.equal(one.score.view(torch.int32), other.score.view(torch.int32))


@pytest.mark.parametrize("space", SPACES)
@given(data=st.data())
def test_waves_equal_the_brute_force(space: ScoreSpace, data: st.DataObject) -> None:
    world = data.draw(worlds())
    wave = data.draw(st.lists(asks(len(world.sids)), min_size=1, max_size=3))
    wanted = [brute_force(world, ask, space) for ask in wave]
    assume(min(one.gap for one in wanted) > FLOAT32_ERROR)
    found = search(world, wave, space)
    for ask, hits, brute in zip(wave, found.hits, wanted, strict=True):
        assert_same(hits, brute)
        assert len(hits) == min(ask.n, len(legal_sids(world, ask.leaf_filter)))
    assert_same_bits(search(world, wave, space, dense=False).frontier, found.frontier)


@pytest.mark.parametrize("space", SPACES)
def test_scored_end_token_is_one_more_level(space: ScoreSpace) -> None:
    sids = [(a, b) for a in range(4) for b in range(4) if (a + b) % 3]
    world = World.make(sids, (4, 4), seed=5)
    ask = Ask(prompt=1, n=6, leaf_filter=LeafFilter(np.array([0, 7]), allow=False))
    wanted = brute_force(world, ask, space, score_end=True)
    assert wanted.gap > FLOAT32_ERROR
    assert_same(search(world, [ask], space, score_end=True).hits[0], wanted)
    if space in (ScoreSpace.VOCAB, ScoreSpace.SID):
        with pytest.raises(AssertionError):
            assert_same(search(world, [ask], space).hits[0], wanted)


@pytest.mark.parametrize("dense", [True, False])
@given(data=st.data())
def test_ties_go_to_the_lower_parent_rank_then_the_lower_token_id(dense: bool, data: st.DataObject) -> None:
    world = data.draw(worlds())
    # Rows of zeros and ones: paths of equal scores abound, and equal sums of two terms are equal in float32 too.
    size = len(world.head)
    ones = data.draw(st.lists(st.booleans(), min_size=size, max_size=size)) if len(world.sizes) < 3 else [True] * size
    head = torch.tensor(ones).float().unsqueeze(1).expand(-1, HIDDEN).contiguous() / HIDDEN
    flat = World(world.sids, world.sizes, world.layout, world.trie, head, flat=True)
    ask = Ask(n=data.draw(st.integers(1, 15)))
    for space in (ScoreSpace.VOCAB, ScoreSpace.SID, ScoreSpace.LEVEL):
        (found,) = search(flat, [ask], space, dense=dense).hits
        assert [hit.codes for hit in found] == [hit.codes for hit in brute_force(flat, ask, space).hits]


def equal_scores() -> World:
    """Every legal SID has the same score; the token ids of the codebooks do not ascend with their codes."""
    sids = [(a, b) for a in range(5) for b in range(5)]
    world = World.make(sids, (5, 5), seed=2, head=torch.zeros(14, HIDDEN))
    assert all((np.diff(book) < 0).any() for book in world.layout.codebooks)
    return world


def test_token_ids_not_codes_break_ties() -> None:
    world = equal_scores()
    (found,) = search(world, [Ask(n=25)]).hits
    tokens = [world.layout.token_ids(hit.codes) for hit in found]
    assert tokens == sorted(tokens)
    assert [hit.codes for hit in found] != sorted(hit.codes for hit in found)


def test_another_tie_break_would_be_seen() -> None:
    real = expand_module.order_key

    def reversed_ties(score: torch.Tensor, rank: torch.Tensor, legal: torch.Tensor) -> torch.Tensor:
        return real(score, rank.max() - rank, legal)

    world, ask = equal_scores(), Ask(n=7)
    with mock.patch.object(expand_module, "order_key", reversed_ties):
        (found,) = search(world, [ask]).hits
    assert [hit.codes for hit in found] != [hit.codes for hit in brute_force(world, ask, ScoreSpace.SID).hits]


def test_fewer_legal_than_asked_for_returns_all_once() -> None:
    world = World.make([(0, 1), (2, 0), (2, 3)], (3, 4), seed=1)
    for space in SPACES:
        (found,) = search(world, [Ask(n=12)], space).hits
        assert sorted(hit.codes for hit in found) == [(0, 1), (2, 0), (2, 3)]


def test_empty_allow_list_returns_nothing_and_leaves_its_mates_alone() -> None:
    world = World.make([(a, b) for a in range(3) for b in range(3)], (3, 3), seed=1)
    nothing = Ask(prompt=1, leaf_filter=LeafFilter(np.empty(0, dtype=np.int64), allow=True))
    everything_out = Ask(prompt=2, leaf_filter=LeafFilter(np.arange(9), allow=False))
    mate = Ask(prompt=3, n=4)
    found = search(world, [nothing, mate, everything_out])
    assert found.hits[0] == found.hits[2] == []
    assert found.hits[1] == search(world, [mate]).hits[0]


def test_same_bits_alone_and_in_company() -> None:
    sids = [(a, b, c) for a in range(5) for b in range(5) for c in range(5) if (a * b + c) % 2]
    world = World.make(sids, (5, 5, 5), seed=8)
    probe = Ask(prompt=4, n=7, leaf_filter=LeafFilter(np.array([3, 11, 30]), allow=False))
    mates = [Ask(prompt=5, n=1), Ask(prompt=6, n=20, leaf_filter=LeafFilter(np.array([1, 2]), allow=True))]
    for space in SPACES:
        (alone,) = search(world, [probe], space).hits
        assert search(world, [mates[0], probe, mates[1]], space).hits[1] == alone
        assert search(world, [probe, *mates], space, padding=0).hits[0] == alone


def test_a_token_in_two_codebooks_is_refused() -> None:
    world = World.make([(0, 0)], (2, 2), seed=0)
    shared = SidLayout((world.layout.codebooks[0],) * 2, world.layout.texts)
    with pytest.raises(LayoutError, match="stands in two codebooks"):
        head_levels(shared, world.head, ScoreSpace.SID, score_end=False)
    with pytest.raises(LayoutError, match="no end token to score"):
        head_levels(shared, world.head, ScoreSpace.SID, score_end=True)
