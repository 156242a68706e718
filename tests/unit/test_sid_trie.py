"""The trie against brute force over random catalogs of one to five levels."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrec.sid.trie import Trie, build_trie

Sids = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]


@st.composite
def catalogs(draw: st.DrawFn) -> Sids:
    """Codebook sizes, and sorted distinct SIDs over them."""
    sizes = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=5)))
    sid = st.tuples(*(st.integers(0, size - 1) for size in sizes))
    return sizes, tuple(sorted(draw(st.sets(sid, min_size=1, max_size=40))))


def prefixes(sids: tuple[tuple[int, ...], ...], level: int) -> list[tuple[int, ...]]:
    return sorted({sid[:level] for sid in sids})


@given(catalogs())
def test_nodes_children_and_leaves_equal_brute_force(catalog: Sids) -> None:
    sizes, sids = catalog
    trie = build_trie(np.array(sids, dtype=np.int32), sizes)
    assert trie.depth == len(sizes)
    assert trie.num_leaves == trie.num_nodes(trie.depth) == len(sids)
    for level in range(trie.depth):
        nodes, children = prefixes(sids, level), prefixes(sids, level + 1)
        assert trie.num_nodes(level) == len(nodes)
        starts, leaves = trie.child_start[level], trie.leaf_start[level]
        for node, prefix in enumerate(nodes):
            mine = [child for child in children if child[:level] == prefix]
            edges = range(starts[node], starts[node + 1])
            assert [children[edge] for edge in edges] == mine
            assert trie.child_code[level][edges.start : edges.stop].tolist() == [child[-1] for child in mine]
            below = [rank for rank, sid in enumerate(sids) if sid[:level] == prefix]
            assert list(range(leaves[node], leaves[node + 1])) == below
        assert trie.max_children[level] == max(b - a for a, b in pairwise(starts.tolist()))


@given(catalogs())
def test_dense_and_csr_are_the_same_tree(catalog: Sids) -> None:
    sizes, sids = catalog
    trie = build_trie(np.array(sids, dtype=np.int32), sizes)
    for level, size in enumerate(sizes):
        table = trie.dense(level)
        assert table.dtype == np.int32
        assert table.shape == (trie.num_nodes(level), size)
        children = prefixes(sids, level + 1)
        for node, prefix in enumerate(prefixes(sids, level)):
            expected = [children.index((*prefix, code)) if (*prefix, code) in children else -1 for code in range(size)]
            assert table[node].tolist() == expected


@given(catalogs())
def test_arrays_rebuild_the_trie(catalog: Sids) -> None:
    sizes, sids = catalog
    trie = build_trie(np.array(sids, dtype=np.int32), sizes)
    again = Trie.from_arrays(trie.arrays())
    assert again.sizes == sizes
    for mine, other in ((trie.child_start, again.child_start), (trie.leaf_start, again.leaf_start)):
        assert [array.tolist() for array in mine] == [array.tolist() for array in other]
        assert all(array.dtype == np.int32 for array in other)
    assert [array.tolist() for array in trie.child_code] == [array.tolist() for array in again.child_code]
    assert again.device_bytes() == trie.device_bytes()


def test_codes_take_two_bytes_up_to_32768_and_four_beyond() -> None:
    sids = np.array([[0, 0], [32767, 32768]], dtype=np.int32)
    trie = build_trie(sids, (32768, 32769))
    assert [codes.dtype for codes in trie.child_code] == [np.int16, np.int32]
    assert trie.child_code[0].tolist() == [0, 32767]
    assert trie.child_code[1].tolist() == [0, 32768]


def test_dense_levels_stop_where_the_budget_does() -> None:
    sids = np.array([[0, 0, 0], [1, 2, 3], [1, 3, 0]], dtype=np.int32)
    trie = build_trie(sids, (4, 4, 4))
    # 4 cells for the root, 2 x 4 for its children, 3 x 4 below them.
    assert trie.dense_levels(3) == (False, False, False)
    assert trie.dense_levels(4) == (True, False, False)
    assert trie.dense_levels(12) == (True, True, False)
    assert trie.dense_levels(24) == (True, True, True)


def test_device_bytes_counts_each_array_once() -> None:
    sids = np.array([[0, 0, 0], [1, 2, 3], [1, 3, 0]], dtype=np.int32)
    trie = build_trie(sids, (4, 4, 4))
    leaf = (2 + 3 + 4) * 4
    csr = (2 * 4 + 2 * 2) + (3 * 4 + 3 * 2) + 3 * 2  # the last level's starts are its leaf ranges
    assert trie.device_bytes(0) == leaf + csr
    assert trie.device_bytes(24) == leaf + (4 + 8 + 12) * 4


@pytest.mark.parametrize(
    ("sids", "sizes", "reason"),
    [
        ([[1, 0], [0, 0]], (2, 2), "not sorted at level 0"),
        ([[0, 1], [0, 0]], (2, 2), "not sorted at level 1"),
        ([[0, 0], [0, 0]], (2, 2), "not distinct"),
        ([[0, 2]], (2, 2), "level 1 holds a code outside 0 .. 1"),
        ([[-1, 0]], (2, 2), "level 0 holds a code outside 0 .. 1"),
        ([[0, 0]], (2, 2, 2), "1 SIDs of depth 2 for 3 codebooks"),
    ],
)
def test_what_is_not_a_sorted_set_is_refused(sids: list[list[int]], sizes: tuple[int, ...], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        build_trie(np.array(sids, dtype=np.int32), sizes)


def test_no_sids_are_refused() -> None:
    with pytest.raises(ValueError, match="0 SIDs"):
        build_trie(np.empty((0, 2), dtype=np.int32), (2, 2))


def test_a_large_random_catalog_stays_small() -> None:
    rng = np.random.default_rng(7)
    sids = np.unique(rng.integers(0, 8192, (50_000, 3), dtype=np.int32), axis=0)
    trie = build_trie(sids, (8192, 8192, 8192))
    assert trie.device_bytes() <= 12 * len(sids)
    level_one = np.unique(sids[:, :2], axis=0)
    assert trie.num_nodes(2) == len(level_one)
    assert np.array_equal(trie.child_code[1], level_one[:, 1])
