"""How two ranked lists agree: first choice, common items, order of the common ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flashrec_harness.references.types import RankedList


def same_first(ours: RankedList, theirs: RankedList) -> bool:
    return [h.token_ids for h in ours[:1]] == [h.token_ids for h in theirs[:1]]


def overlap(ours: RankedList, theirs: RankedList) -> float:
    """Share of the longer list that both hold; 1 for two empty lists."""
    longest = max(len(ours), len(theirs))
    common = {h.token_ids for h in ours} & {h.token_ids for h in theirs}
    return len(common) / longest if longest else 1.0


def spearman(ours: RankedList, theirs: RankedList) -> float | None:
    """Rank correlation over the common hypotheses; ``None`` with fewer than two of them."""
    places = {h.token_ids: place for place, h in enumerate(theirs)}
    order = [places[h.token_ids] for h in ours if h.token_ids in places]
    if len(order) < 2:
        return None
    return rank_correlation(order)


def rank_correlation(order: Sequence[int]) -> float:
    """Spearman's rho between 0, 1, 2, ... and ``order``, whose values are distinct."""
    count = len(order)
    ranks = np.argsort(np.argsort(order))
    squares = float(((ranks - np.arange(count)) ** 2).sum())
    return 1.0 - 6.0 * squares / (count * (count**2 - 1))
