"""The statistics of performance verdicts, with their false-alarm rate and power measured by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from flashrec_harness import stats

positive = st.floats(1e-6, 1e6)


@given(positive, positive)
def test_log_ratio_is_antisymmetric_and_percent_undoes_it(a: float, b: float) -> None:
    assert stats.log_ratio(a, b) == pytest.approx(-stats.log_ratio(b, a), abs=1e-12)
    assert stats.percent(stats.log_ratio(a, b)) == pytest.approx((a / b - 1) * 100, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(("a", "b"), [(0.0, 1.0), (1.0, -1.0), (math.nan, 1.0)])
def test_log_ratio_refuses_what_has_no_logarithm(a: float, b: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        stats.log_ratio(a, b)


def test_spread_recovers_the_variance_components_it_was_made_from() -> None:
    rng = np.random.default_rng(1)
    within, between = 0.01, 0.03
    sessions = [list(np.exp(math.log(200) + rng.normal(0, between) + rng.normal(0, within, 8))) for _ in range(400)]
    found = stats.spread(sessions)
    assert found.centre == pytest.approx(200, rel=0.01)
    assert found.within_session == pytest.approx(within, rel=0.05)
    assert found.between_sessions == pytest.approx(between, rel=0.1)
    assert (found.sessions, found.processes) == (400, 3200)


def test_spread_sees_no_session_noise_where_processes_explain_it() -> None:
    found = stats.spread([[100, 102], [101, 99], [102, 100]])
    assert found.between_sessions < 0.003
    assert found.within_session == pytest.approx(0.014, rel=0.1)


def test_band_is_the_formula_and_never_below_the_floor() -> None:
    base = stats.Spread(100, within_session=0.02, between_sessions=0.03, sessions=4, processes=16)
    assert stats.band(base, 4) == pytest.approx(2 * math.sqrt(0.03**2 * 1.25 + 0.02**2 / 4))
    assert stats.band(stats.Spread(100, 0.0001, 0.0, 4, 16), 4) == stats.FLOOR


@given(st.dictionaries(st.text(min_size=1), st.floats(0, 1), min_size=1, max_size=8))
def test_holm_equals_adjusted_p_values(p_values: dict[str, float]) -> None:
    ordered = sorted(p_values.values())
    adjusted, running = {}, 0.0
    for index, p in enumerate(ordered):
        running = max(running, min(1.0, (len(ordered) - index) * p))
        adjusted[p] = max(running, adjusted.get(p, 0.0))
    rejected = stats.holm(p_values, 0.05)
    for name, p in p_values.items():
        if ordered.count(p) == 1:
            assert rejected[name] == (adjusted[p] <= 0.05)


def test_holm_known_example() -> None:
    assert stats.holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}, 0.05) == {
        "a": True,
        "b": False,
        "c": False,
        "d": True,
    }


def test_abba_cancels_a_linear_drift() -> None:
    order = stats.abba_order(4)
    assert order == "ABBAABBA"
    drift = np.arange(len(order), dtype=float)
    is_a = np.array([side == "A" for side in order])
    assert drift[is_a].sum() == drift[~is_a].sum()


def test_paired_interval_is_students() -> None:
    a, b = [100.0, 102, 99, 101, 100], [97.0, 99, 97, 98, 96]
    ratios = np.log(np.array(b) / np.array(a))
    expected = scipy_stats.ttest_1samp(ratios, 0.0).confidence_interval(0.99)
    found = stats.paired_interval(a, b)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    with pytest.raises(ValueError, match="at least 2"):
        stats.paired_interval([1.0], [1.0])


@pytest.mark.parametrize(
    ("mean", "half", "rejected", "verdict"),
    [
        (-0.05, 0.01, True, "slower"),
        (0.05, 0.01, True, "faster"),
        (-0.05, 0.01, False, "inconclusive"),
        (0.0, 0.005, False, "within noise"),
        (-0.008, 0.004, True, "within noise"),
        (0.004, 0.02, False, "within noise"),
        (-0.02, 0.02, False, "inconclusive"),
        (0.02, 0.06, False, "inconclusive"),
    ],
)
def test_paired_verdicts_of_a_throughput(mean: float, half: float, rejected: bool, verdict: str) -> None:
    interval = stats.PairedInterval(mean, mean - half, mean + half, 0.01, 5)
    mirrored = stats.PairedInterval(-mean, -mean - half, -mean + half, 0.01, 5)
    assert stats.paired_verdict(interval, rejected=rejected, worse=-1) == verdict
    assert stats.paired_verdict(mirrored, rejected=rejected, worse=1) == verdict


def test_paired_p_value_is_students() -> None:
    a, b = [100.0, 102, 99, 101, 100], [97.0, 99, 97, 98, 96]
    expected = scipy_stats.ttest_1samp(np.log(np.array(b) / np.array(a)), 0.0).pvalue
    assert stats.paired_p_value(stats.paired_interval(a, b)) == pytest.approx(expected)
    assert stats.paired_p_value(stats.PairedInterval(0.0, 0.0, 0.0, 0.0, 5)) == 1.0
    assert stats.paired_p_value(stats.PairedInterval(-0.1, -0.1, -0.1, 0.0, 5)) == 0.0


def test_paired_detectable_has_the_power_it_states() -> None:
    """5,000 simulated experiments of 8 pairs at the change that it names: rejected in about 95 % of them."""
    sd, pairs, comparisons = 0.012, 8, 3
    effect = stats.paired_detectable(sd, pairs, comparisons=comparisons)
    draws = np.random.default_rng(5).normal(effect, sd, (5000, pairs))
    errors = draws.std(1, ddof=1) / math.sqrt(pairs)
    p_values = 2 * scipy_stats.t.sf(np.abs(draws.mean(1)) / errors, pairs - 1)
    assert np.mean(p_values <= 0.01 / comparisons) == pytest.approx(0.95, abs=0.01)


def test_noisier_pairs_need_more_of_them_until_none_suffice() -> None:
    needed = [stats.pairs_needed(sd, 0.03) for sd in (0.005, 0.01, 0.02)]
    assert needed[0] == stats.MIN_PAIRS
    assert [n for n in needed if n is not None] == sorted(n for n in needed if n is not None)
    assert needed[2] is not None
    assert stats.pairs_needed(0.1, 0.03) is None
    assert (stats.pairs_needed(0.01, 0.03, comparisons=6) or 99) > (needed[1] or 99)


def test_spread_bound_covers_the_true_spread_in_three_of_four_samples() -> None:
    draws = np.random.default_rng(6).normal(0, 0.01, (4000, 5)).std(1, ddof=1)
    assert np.mean([stats.spread_bound(float(sd), 5) >= 0.01 for sd in draws]) == pytest.approx(0.75, abs=0.02)


def screen_rate(true_change: float, *, sessions: int, processes: int, trials: int = 1500) -> float:
    """How often the screen rejects one metric of three, all drawn with session sd 0.5 % and process sd 1 %."""
    rng = np.random.default_rng(7)
    rejected = 0
    for _ in range(trials):
        p_values, worse = {}, {}
        for metric in range(3):
            shape = (sessions, processes)
            stored = rng.normal(0, 0.005, (sessions, 1)) + rng.normal(0, 0.01, shape)
            base = stats.spread([list(row) for row in np.exp(stored)])
            new = np.mean(rng.normal(0, 0.005) + rng.normal(0, 0.01, processes)) + true_change
            band = stats.band(base, processes)
            change = float(new) - math.log(base.centre)
            p_values[str(metric)] = stats.screen_p_value(change, band, sessions)
            worse[str(metric)] = change > band
        found = stats.holm(p_values)
        rejected += any(found[name] and worse[name] for name in found)
    return rejected / trials


def test_screen_alarms_rarely_on_equal_sessions_and_surely_on_five_percent() -> None:
    """Simulated: 0.3 % false alarms with 3 stored sessions, 1.5 % with 5; 99 % of 5 % slowdowns are found."""
    for sessions, processes in ((3, 3), (5, 4)):
        assert screen_rate(0.0, sessions=sessions, processes=processes) <= 0.03
        assert screen_rate(0.05, sessions=sessions, processes=processes, trials=400) >= 0.95


def test_screen_detectable_has_the_power_it_states() -> None:
    band = 0.02
    effect = stats.screen_detectable(band, 5, metrics=3)
    draws = np.random.default_rng(3).normal(effect, band / stats.BAND_WIDTH, 5_000)
    power = np.mean([stats.screen_p_value(float(d), band, 5) <= stats.SCREEN_ALPHA / 3 for d in draws])
    assert power == pytest.approx(0.95, abs=0.01)


def test_trend_finds_a_process_that_warms_up_despite_an_outlier() -> None:
    values = [100 * 1.02**step for step in range(9)]
    values[4] = 30.0
    assert stats.trend(values) == pytest.approx(math.log(1.02), rel=0.05)
    assert stats.trend([5.0]) == 0.0
