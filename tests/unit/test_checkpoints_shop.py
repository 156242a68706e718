"""The synthetic shop: its exact next-purchase distribution against enumeration and against samples."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrec_harness.checkpoints.make_shop import optimum
from flashrec_harness.checkpoints.sequences import hold_out
from flashrec_harness.checkpoints.shop import Shop, ShopConfig

SMALL = ShopConfig(
    codebook_sizes=(4, 4, 6),
    departments=2,
    series_per_department=(2, 3),
    items_per_series=(1, 4),
    shared_sid_share=0.3,
    interests=3,
    tastes=2,
    stay=0.7,
)
SHOP = Shop(SMALL, seed=3)


def enumerated(shop: Shop, history: list[str]) -> np.ndarray:
    """The next-purchase distribution by summing over every path of hidden states."""
    c = shop.config
    total = np.zeros(len(shop.sids))
    for taste in range(c.tastes):
        for path in itertools.product(range(c.interests), repeat=len(history) + 1):
            weight = 1 / (c.tastes * c.interests)
            last = None
            for position, item in enumerate(history):
                row = shop.items[item]
                series = int(shop.series[row])
                weight *= shop.series_probs(last)[path[position], series] * shop.item_weight[taste, row]
                weight *= shop.interest_step[path[position], path[position + 1]]
                last = series
            total += weight * shop.series_probs(last)[path[-1]][shop.series] * shop.item_weight[taste]
    return total / total.sum()


@given(st.lists(st.sampled_from(sorted(SHOP.items)), max_size=3))
def test_next_purchase_equals_enumeration_of_hidden_paths(history: list[str]) -> None:
    # A single-category history may be impossible for the generator; only possible ones have a next purchase.
    by_hand = enumerated_or_none(history)
    if by_hand is not None:
        np.testing.assert_allclose(SHOP.next_sid_probs(history), by_hand, rtol=1e-9, atol=1e-14)


def enumerated_or_none(history: list[str]) -> np.ndarray | None:
    with np.errstate(invalid="ignore"):
        probs = enumerated(SHOP, history)
    return None if np.isnan(probs).any() else probs


def test_samples_follow_the_distribution() -> None:
    users = 20_000
    first = [SHOP.items[h.items[0]] for h in SHOP.sample(users, seed=1, lengths=(1, 1))]
    expected = SHOP.next_sid_probs([])
    found = np.bincount(first, minlength=len(expected)) / users
    assert np.all(np.abs(found - expected) < 5 * np.sqrt(expected * (1 - expected) / users) + 1e-9)


def test_optimum_predicts_the_hits_that_are_drawn() -> None:
    rows = hold_out(SHOP.sample(3_000, seed=7))
    found = optimum(SHOP, rows, k=3)
    assert found["HR@3"] == pytest.approx(found["HR@3 expected"], abs=4 * np.sqrt(0.25 / len(rows)))


def test_a_wrong_generator_shows() -> None:
    """Negative control: a generator with other mixture weights does not predict this shop's hits."""
    other = Shop(replace(SMALL, more=0.05, goes_with=0.9), seed=3)
    rows = hold_out(SHOP.sample(3_000, seed=7))
    found = optimum(other, rows, k=3)
    assert abs(found["HR@3"] - found["HR@3 expected"]) > 0.1


def test_the_default_shop() -> None:
    shop = Shop()
    assert 2_000 < len(shop.sids) < 4_000
    assert len({tuple(sid) for sid in shop.sids.tolist()}) == len(shop.sids)
    assert np.all(shop.sids >= 0)
    assert np.all(shop.sids < np.array(shop.config.codebook_sizes))
    names = [len(items) for items in shop.items_of_sid]
    assert set(names) == {1, 2}, "some SIDs name two items"
    assert (np.bincount(shop.series) == 1).any(), "some prefixes have a single child"
    assert set(shop.titles) == set(shop.items)
    np.testing.assert_allclose(shop.browsing.sum(1), 1)
    np.testing.assert_allclose(shop.companion.sum(1), 1)
    np.testing.assert_allclose(shop.interest_step.sum(1), 1)


def test_the_seed_decides() -> None:
    assert SHOP.sample(5, seed=1) == Shop(SMALL, seed=3).sample(5, seed=1)
    assert SHOP.sample(5, seed=1) != SHOP.sample(5, seed=2)
    assert not np.array_equal(SHOP.sids, Shop(SMALL, seed=4).sids)
