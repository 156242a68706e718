"""HR@k, NDCG@k and the baselines, against values worked out by hand and by brute force."""

from __future__ import annotations

from math import log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrec_harness import quality

SEQUENCES = [[1, 2, 3], [1, 2], [2, 3, 4], [1, 3], [5, 2, 5]]


def test_metrics_by_hand() -> None:
    rankings = [[7, 8, 9], [8, 7], [1, 2, 3], []]
    found = quality.metrics(rankings, [7, 7, 9, 1], cutoffs=(1, 2, 3))
    assert found["HR@1"] == 0.25
    assert found["HR@2"] == 0.5
    assert found["NDCG@1"] == 0.25
    assert found["NDCG@3"] == pytest.approx((1 + 1 / log2(3)) / 4)


@given(st.lists(st.tuples(st.permutations(range(6)), st.integers(0, 5)), min_size=1, max_size=8), st.integers(1, 6))
def test_metrics_by_brute_force(rows: list[tuple[list[int], int]], k: int) -> None:
    rankings, targets = [row[0] for row in rows], [row[1] for row in rows]
    found = quality.metrics(rankings, targets, cutoffs=[k])
    hits = [target in ranking[:k] for ranking, target in rows]
    gains = [
        sum((item == target) / log2(place + 2) for place, item in enumerate(ranking[:k])) for ranking, target in rows
    ]
    assert found[f"HR@{k}"] == pytest.approx(np.mean(hits))
    assert found[f"NDCG@{k}"] == pytest.approx(np.mean(gains))


def test_popularity_counts_every_purchase() -> None:
    assert quality.popularity(SEQUENCES)([], 3) == [2, 1, 3]


def test_markov_ranks_what_followed_then_popularity() -> None:
    recommend = quality.markov(SEQUENCES)
    # After 1: 2 twice, 3 once; then by popularity without repeats.
    assert recommend([9, 1], 5) == [2, 3, 1, 5, 4]
    assert recommend([4], 2) == [2, 1], "nothing ever followed 4"


def test_cooccurrence_counts_distinct_pairs_of_a_sequence() -> None:
    recommend = quality.cooccurrence(SEQUENCES)
    # With 5 stands 2, once in one sequence although 5 was bought twice there.
    assert recommend([5], 1) == [2]
    # With 1: 2 and 3 twice each. With 4: 2 and 3 once each. Ties go to the lower row.
    assert recommend([1, 4], 2) == [2, 3]


@pytest.mark.parametrize("name", list(quality.BASELINES))
def test_baselines_return_k_distinct_rows(name: str) -> None:
    recommend = quality.BASELINES[name](SEQUENCES)
    for history in ([1], [4, 5], [99]):
        ranking = recommend(history, 5)
        assert sorted(ranking) == [1, 2, 3, 4, 5]
