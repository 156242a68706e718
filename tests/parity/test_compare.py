"""The comparison finds every planted difference, and nothing where there is none."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from flashrec_harness.outcome import Outcome
from flashrec_harness.parity.agreement import overlap, rank_correlation, same_first, spearman
from flashrec_harness.parity.compare import Agreement, Tolerance, compare_lists, first_difference, malformed
from flashrec_harness.parity.comparison import Comparison, side_by_side
from flashrec_harness.references.oracle import Explanation
from flashrec_harness.references.types import Hypothesis, RankedList, SearchCase

CASE = SearchCase(name="case", prompt=(1,), n=4, beam_width=4, max_tokens=1)
LIST: RankedList = tuple(Hypothesis((token,), -0.1 * token, -0.1 * token) for token in (1, 2, 3, 4))


def near_tie(_case: SearchCase, _ranked: RankedList, _band: float) -> Explanation:
    return Explanation(True, 1e-6)


def no_tie(_case: SearchCase, _ranked: RankedList, _band: float) -> Explanation:
    return Explanation(False, 0.0, "no search returns it")


def moved(ranked: RankedList, by: float) -> RankedList:
    return tuple(replace(h, cumulative=h.cumulative + by, score=h.score + by) for h in ranked)


def swapped() -> RankedList:
    first, second = LIST[:2]
    return (replace(second, score=first.score), replace(first, score=second.score), *LIST[2:])


def test_equal_lists_are_equal_and_their_score_error_is_measured() -> None:
    verdict = compare_lists(CASE, moved(LIST, 3e-5), LIST, Tolerance(), no_tie)
    assert verdict.agreement is Agreement.EQUAL
    assert verdict.score_error == pytest.approx(3e-5)


def test_a_score_beyond_the_tolerance_differs_even_where_the_choices_agree() -> None:
    verdict = compare_lists(CASE, moved(LIST, 1.1e-4), LIST, Tolerance(), near_tie)
    assert verdict.agreement is Agreement.DIFFERENT
    assert "0.00011" in verdict.reason


@pytest.mark.parametrize("field", ["score", "cumulative"])
def test_nan_differs(field: str) -> None:
    ours = (replace(LIST[0], **{field: math.nan}), *LIST[1:])
    assert compare_lists(CASE, ours, LIST, Tolerance(), near_tie).agreement is Agreement.DIFFERENT


def test_a_wrong_sum_differs_even_where_the_score_agrees() -> None:
    ours = (replace(LIST[0], cumulative=-9.0), *LIST[1:])
    assert compare_lists(CASE, ours, LIST, Tolerance(), near_tie).agreement is Agreement.DIFFERENT


def test_a_swap_is_a_near_tie_only_where_float64_says_so() -> None:
    close = tuple(replace(h, score=-1e-6 * h.token_ids[0], cumulative=-1e-6 * h.token_ids[0]) for h in LIST)
    ours = (replace(close[1], score=0.0), *(close[0],), *close[2:])
    accepted = compare_lists(CASE, ours, close, Tolerance(), near_tie)
    assert (accepted.agreement, accepted.gap) == (Agreement.NEAR_TIE, 1e-6)
    refused = compare_lists(CASE, ours, close, Tolerance(), no_tie)
    assert refused.agreement is Agreement.DIFFERENT
    assert "rank 1" in refused.reason
    assert compare_lists(CASE, ours, close, Tolerance(), None).agreement is Agreement.UNDECIDED


@pytest.mark.parametrize(
    ("ours", "word"),
    [
        ((*LIST[:2], LIST[1], LIST[3]), "same hypothesis"),
        ((LIST[1], LIST[0], *LIST[2:]), "scores above"),
    ],
)
def test_a_malformed_list_differs_before_it_is_compared(ours: RankedList, word: str) -> None:
    verdict = compare_lists(CASE, ours, ours, Tolerance(), near_tie)
    assert verdict.agreement is Agreement.DIFFERENT
    assert word in verdict.reason


def test_a_missing_and_a_surplus_hypothesis_are_named() -> None:
    assert "nothing where the reference has (4,)" in first_difference(LIST[:3], LIST)
    assert "(4,) (-0.400000) where the reference has nothing" in first_difference(LIST, LIST[:3])
    assert malformed(()) == malformed(LIST) == ""


def lists_against(ours: list[RankedList], explain: object = near_tie) -> Comparison:
    cases = [replace(CASE, name=f"case-{index}") for index in range(len(ours))]
    return Comparison.of("ours", cases, ours, [LIST] * len(ours), explain)  # type: ignore[arg-type]


def test_one_different_list_in_a_hundred_fails() -> None:
    assert lists_against([LIST] * 100).outcome() == (Outcome.PASS, "")
    outcome, reason = lists_against([LIST] * 57 + [moved(LIST, 1.0)] + [LIST] * 42).outcome()
    assert outcome is Outcome.FAIL
    assert "case-57" in reason


@pytest.mark.parametrize(("count", "allowed"), [(20, 1), (66, 1), (134, 2), (200, 3), (400, 6)])
def test_near_ties_are_capped_at_three_in_two_hundred(count: int, allowed: int) -> None:
    tie = tuple(Hypothesis(h.token_ids, s, s) for h, s in zip(swapped(), (-0.15,) * 2 + (-0.3, -0.4), strict=True))
    near = (replace(LIST[0], score=-0.15, cumulative=-0.15), replace(LIST[1], score=-0.15, cumulative=-0.15), *LIST[2:])
    cases = [replace(CASE, name=f"case-{index}") for index in range(count)]
    for ties, outcome in ((allowed, Outcome.PASS), (allowed + 1, Outcome.FAIL)):
        ours = [tie] * ties + [near] * (count - ties)
        comparison = Comparison.of("ours", cases, ours, [near] * count, near_tie)
        assert comparison.outcome()[0] is outcome
        assert len(comparison.check().data["near_ties"]) == ties


def test_nothing_compared_is_invalid_and_undecided_is_inconclusive() -> None:
    assert lists_against([]).outcome()[0] is Outcome.INVALID
    assert Comparison.of("ours", [CASE], [()], [()], near_tie).outcome()[0] is Outcome.INVALID
    assert lists_against([LIST[:3]], explain=None).outcome()[0] is Outcome.INCONCLUSIVE


def test_the_check_shows_what_was_compared_and_each_difference_side_by_side() -> None:
    check = lists_against([LIST, LIST[:3]], explain=no_tie).check()
    assert check.summary.startswith("2 lists, 8 hypotheses, n 4")
    assert "1 equal, 1 different" in check.summary
    (row,) = check.rows
    assert (row["n"], row["lists"], row["equal"], row["different"]) == (4, 2, 1, 1)
    assert (row["top-1"], row["overlap"], row["Spearman"]) == ("100.0%", "87.50%", "1.000000")
    (listed,) = check.data["different"]
    assert listed["side_by_side"][3] == {
        "rank": 4,
        "ours": None,
        "score": None,
        "reference": [4],
        "reference score": -0.4,
    }
    assert len(side_by_side(lists_against([LIST[:3]]).verdicts[0])) == 4


@given(st.permutations(range(9)))
def test_rank_correlation_is_spearmans(order: list[int]) -> None:
    expected = spearmanr(range(9), order).statistic
    assert rank_correlation(order) == pytest.approx(expected, abs=1e-12)


def test_agreement_of_partly_common_lists() -> None:
    theirs = (LIST[3], LIST[0], LIST[1])
    assert not same_first(LIST, theirs)
    assert overlap(LIST, theirs) == 0.75
    assert spearman(LIST, theirs) == pytest.approx(spearmanr([0, 1, 2], [1, 2, 0]).statistic)
    assert spearman(LIST[:1], LIST[1:]) is None
    assert overlap((), ()) == 1.0
