"""How good rankings are: HR@k, recall@k, NDCG@k, and the baselines that a model has to beat.

Rankings are of anything that can be compared: catalog rows (*ranks* of ``Catalog.sids``), where a hit is a match of
the semantic ID, or items.
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


def target_places(ranking: Sequence[object] | NDArray[np.int64], targets: Sequence[object]) -> NDArray[np.int64]:
    """int64: the 0-based places of those distinct ``targets`` that the ranking holds, each at its first."""
    first: dict[object, int] = {}
    for place, found in enumerate(ranking.tolist() if isinstance(ranking, np.ndarray) else ranking):
        first.setdefault(found, place)
    return np.array(sorted(first[target] for target in set(targets) if target in first), dtype=np.int64)


def row_metrics(
    rankings: Sequence[Sequence[object] | NDArray[np.int64]],
    targets: Sequence[Sequence[object]],
    cutoffs: Iterable[int] = CUTOFFS,
) -> dict[str, NDArray[np.float64]]:
    """``HR@k``, ``recall@k`` and ``NDCG@k`` for each cutoff, one value per row.

    HR is 1 where any target is among the first ``k``; recall is the share of the targets that are. DCG is the sum
    of ``1 / log2(place + 2)`` over them, and NDCG divides it by that of a perfect list (Jarvelin, Kekalainen, 2002).
    With one target, recall is HR. Each row has at least one.
    """
    places = [target_places(ranking, wanted) for ranking, wanted in zip(rankings, targets, strict=True)]
    counts = [len(set(wanted)) for wanted in targets]
    out: dict[str, NDArray[np.float64]] = {}
    for k in cutoffs:
        hits = [found[found < k] for found in places]
        out[f"HR@{k}"] = np.array([float(len(found) > 0) for found in hits])
        out[f"recall@{k}"] = np.array([len(found) / count for found, count in zip(hits, counts, strict=True)])
        out[f"NDCG@{k}"] = np.array(
            [_gain(found) / _gain(np.arange(min(count, k))) for found, count in zip(hits, counts, strict=True)]
        )
    return out


def _gain(places: NDArray[np.int64]) -> float:
    return float(np.sum(1 / np.log2(places + 2)))


def metrics(
    rankings: Sequence[Sequence[int] | NDArray[np.int64]], targets: Sequence[int], cutoffs: Iterable[int] = CUTOFFS
) -> dict[str, float]:
    """Means of ``HR@k`` and ``NDCG@k`` for each cutoff; each row has one target."""
    rows = row_metrics(rankings, [[target] for target in targets], cutoffs)
    return {name: float(values.mean()) for name, values in rows.items() if not name.startswith("recall")}


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
