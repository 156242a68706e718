"""How good rankings are: HR@k, NDCG@k, and the baselines that a model has to beat.

A hit is a match of the semantic ID, so everything here speaks of catalog rows (*ranks* of ``Catalog.sids``).
Each test row has one target.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Recommend = Callable[[Sequence[int], int], list[int]]
"""``recommend(history, k)``: the top ``k`` catalog rows after a history of rows, best first."""

CUTOFFS = (1, 3, 5, 10, 20, 50)


def target_positions(
    rankings: Sequence[Sequence[int] | NDArray[np.int64]], targets: Sequence[int]
) -> NDArray[np.int64]:
    """int64 ``[rows]``: the 0-based place of each target in its ranking, -1 where it is missing."""
    out = np.full(len(targets), -1, np.int64)
    for row, (ranking, target) in enumerate(zip(rankings, targets, strict=True)):
        places = np.flatnonzero(np.asarray(ranking) == target)
        if len(places):
            out[row] = places[0]
    return out


def hit_rate(positions: NDArray[np.int64], k: int) -> float:
    """HR@k: the share of rows whose target is among the first ``k``."""
    return float(np.mean((positions >= 0) & (positions < k)))


def ndcg(positions: NDArray[np.int64], k: int) -> float:
    """NDCG@k with one relevant item: the mean of ``1 / log2(place + 2)``, 0 beyond ``k``."""
    hit = (positions >= 0) & (positions < k)
    return float(np.mean(np.where(hit, 1 / np.log2(np.maximum(positions, 0) + 2), 0.0)))


def metrics(
    rankings: Sequence[Sequence[int] | NDArray[np.int64]], targets: Sequence[int], cutoffs: Iterable[int] = CUTOFFS
) -> dict[str, float]:
    """``HR@k`` and ``NDCG@k`` for each cutoff."""
    positions = target_positions(rankings, targets)
    out: dict[str, float] = {}
    for k in cutoffs:
        out[f"HR@{k}"] = hit_rate(positions, k)
        out[f"NDCG@{k}"] = ndcg(positions, k)
    return out


def popularity(training: Iterable[Sequence[int]]) -> Recommend:
    """Everyone gets what is bought most often."""
    counts = Counter(row for sequence in training for row in sequence)
    ordered = _ordered(counts)
    return lambda history, k: ordered[:k]


def cooccurrence(training: Iterable[Sequence[int]]) -> Recommend:
    """Items that stand in one sequence with the history's items, counted over distinct pairs; then popularity."""
    training = list(training)
    pairs: dict[int, Counter[int]] = defaultdict(Counter)
    for sequence in training:
        distinct = dict.fromkeys(sequence)
        for row in distinct:
            pairs[row].update(other for other in distinct if other != row)
    fallback = popularity(training)

    def recommend(history: Sequence[int], k: int) -> list[int]:
        counts: Counter[int] = Counter()
        for row in dict.fromkeys(history):
            counts.update(pairs.get(row, {}))
        return _filled(_ordered(counts), fallback, k)

    return recommend


def markov(training: Iterable[Sequence[int]]) -> Recommend:
    """First-order Markov: what most often followed the last item; then popularity."""
    training = list(training)
    following: dict[int, Counter[int]] = defaultdict(Counter)
    for sequence in training:
        for last, row in itertools.pairwise(sequence):
            following[last][row] += 1
    fallback = popularity(training)

    def recommend(history: Sequence[int], k: int) -> list[int]:
        return _filled(_ordered(following.get(history[-1], Counter())), fallback, k)

    return recommend


BASELINES: dict[str, Callable[[Iterable[Sequence[int]]], Recommend]] = {
    "popularity": popularity,
    "co-occurrence": cooccurrence,
    "first-order Markov": markov,
}


def _ordered(counts: Counter[int]) -> list[int]:
    return sorted(counts, key=lambda row: (-counts[row], row))


def _filled(ordered: list[int], fallback: Recommend, k: int) -> list[int]:
    """``ordered``, topped up to ``k`` from the fallback."""
    missing = k - len(ordered)
    if missing <= 0:
        return ordered[:k]
    have = set(ordered)
    return [*ordered, *[row for row in fallback([], k + len(ordered)) if row not in have][:missing]]
