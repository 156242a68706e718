"""The paired bootstrap: coverage by simulation, clusters, and what nothing but agreement can show."""

from __future__ import annotations

import numpy as np
import pytest

from flashrec_harness.evaluation.bootstrap import Interval, paired_intervals


def paired_interval(one: np.ndarray, other: np.ndarray, users: np.ndarray, **options: int) -> Interval:
    return paired_intervals({"x": one}, {"x": other}, users, **options)["x"]


def simulate(rng: np.random.Generator, users: int, effect: float) -> tuple[np.ndarray, np.ndarray]:
    """Hits of two engines that agree on most users; the second loses ``effect`` of all of them."""
    one = (rng.random(users) < 0.5).astype(np.float64)
    flipped = rng.random(users) < 0.1
    other = np.where(flipped, 1 - one, one)
    return one, np.where(rng.random(users) < effect, np.minimum(other, 0), other)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    users = np.arange(400)
    covered = 0
    for trial in range(200):
        one, other = simulate(rng, 400, 0.0)
        found = paired_interval(one, other, users, seed=trial, resamples=500)
        covered += found.low <= 0 <= found.high
    # Binomial(200, 0.95): below 181 or above 198 in fewer than 1 of 200 such tests.
    assert 181 <= covered <= 198


def test_rows_of_one_user_are_drawn_together() -> None:
    rng = np.random.default_rng(1)
    users = np.repeat(np.arange(50), 20)
    effect = np.repeat(rng.normal(size=50), 20)
    whole = paired_interval(effect, np.zeros(1000), users, seed=0)
    as_rows = paired_interval(effect, np.zeros(1000), np.arange(1000), seed=0)
    assert (whole.users, as_rows.users) == (50, 1000)
    # 20 equal rows say no more than one: the interval is sqrt(20) times as wide.
    assert (whole.high - whole.low) / (as_rows.high - as_rows.low) == pytest.approx(20**0.5, rel=0.1)
    assert whole.difference == as_rows.difference == pytest.approx(effect.mean())


def test_agreement_everywhere_shows_no_more_than_three_in_n() -> None:
    same = np.ones(150)
    found = paired_interval(same, same, np.arange(150), seed=0)
    assert (found.differing, found.difference) == (0, 0.0)
    assert (found.low, found.high) == (-0.02, 0.02)
    assert found.verdict(0.02) == "equal"
    assert found.verdict(0.01) == "undecided"


@pytest.mark.parametrize(
    ("difference", "low", "high", "verdict"),
    [
        (0.0, -0.009, 0.009, "equal"),
        (-0.004, -0.008, -0.001, "equal"),
        (-0.03, -0.05, -0.01, "worse"),
        (-0.009, -0.015, -0.003, "undecided"),
        (-0.02, -0.05, 0.01, "undecided"),
        (0.03, 0.01, 0.05, "better"),
        (0.0, -0.02, 0.02, "undecided"),
    ],
)
def test_verdicts_at_a_bound_of_one_in_a_hundred(difference: float, low: float, high: float, verdict: str) -> None:
    assert Interval(difference, low, high, 100, 100, 10).verdict(0.01) == verdict


def test_the_seed_decides() -> None:
    one, other = np.random.default_rng(3).normal(size=(2, 100))
    users = np.arange(100)
    assert paired_interval(one, other, users, seed=1) == paired_interval(one, other, users, seed=1)
    assert paired_interval(one, other, users, seed=1) != paired_interval(one, other, users, seed=2)


def test_every_metric_is_judged_from_its_own_rows() -> None:
    one = {"a": np.array([1.0, 0.0, 1.0]), "b": np.zeros(3)}
    other = {"a": np.zeros(3), "b": np.zeros(3)}
    found = paired_intervals(one, other, np.arange(3), seed=0)
    assert found["a"].difference == pytest.approx(2 / 3)
    assert found["a"].differing == 2
    assert (found["b"].difference, found["b"].low, found["b"].high) == (0.0, -1.0, 1.0)
