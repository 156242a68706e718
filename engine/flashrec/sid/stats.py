"""What a catalog looks like: depth, branching, collisions, codes used."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flashrec.sid.catalog import Catalog
from flashrec.sid.trie import DENSE_CELLS, Trie


@dataclass(frozen=True)
class LevelStats:
    """One level: its codebook, and how many children its nodes have."""

    codebook_size: int
    codes_used: int
    nodes: int
    mean_children: float
    median_children: float
    max_children: int
    single_child_nodes: int
    dense: bool


@dataclass(frozen=True)
class CatalogStats:
    """``shared_sids`` name more than one item, ``sharing_items`` of them in all, ``largest_group`` at most.

    ``repeated_items`` counts item ids that stand under more than one SID, ``duplicate_rows`` the rows that
    repeated a (SID, item) pair. ``device_bytes`` is the trie's size on a device.
    """

    depth: int
    num_sids: int
    num_items: int
    shared_sids: int
    sharing_items: int
    largest_group: int
    repeated_items: int
    duplicate_rows: int
    has_end_level: bool
    has_titles: bool
    digest: str
    device_bytes: int
    levels: tuple[LevelStats, ...]


def catalog_stats(catalog: Catalog, trie: Trie, cell_budget: int = DENSE_CELLS) -> CatalogStats:
    """The statistics of ``catalog``, whose trie is ``trie``."""
    group = np.diff(catalog.item_start)
    dense = trie.dense_levels(cell_budget)
    return CatalogStats(
        depth=catalog.depth,
        num_sids=catalog.num_sids,
        num_items=catalog.num_items,
        shared_sids=int(np.count_nonzero(group > 1)),
        sharing_items=int(group[group > 1].sum()),
        largest_group=int(group.max()),
        repeated_items=_repeated(catalog),
        duplicate_rows=catalog.duplicates,
        has_end_level=catalog.has_end_level,
        has_titles=catalog.titles is not None,
        digest=catalog.digest,
        device_bytes=trie.device_bytes(cell_budget),
        levels=tuple(_level_stats(trie, level, dense[level]) for level in range(trie.depth)),
    )


def _level_stats(trie: Trie, level: int, dense: bool) -> LevelStats:
    children = np.diff(trie.child_start[level])
    return LevelStats(
        codebook_size=trie.sizes[level],
        codes_used=len(np.unique(trie.child_code[level])),
        nodes=len(children),
        mean_children=float(children.mean()),
        median_children=float(np.median(children)),
        max_children=int(children.max()),
        single_child_nodes=int(np.count_nonzero(children == 1)),
        dense=dense,
    )


def _repeated(catalog: Catalog) -> int:
    seen: set[str] = set()
    repeated: set[str] = set()
    for item in catalog.items:
        (repeated if item in seen else seen).add(item)
    return len(repeated)
