"""All references in one table, and every near-tie in a list."""

from __future__ import annotations

from typing import Any

import pytest

from flashrec_harness.outcome import Check, Outcome
from flashrec_harness.parity.overview import overview


def compared(reference: str, search: str, outcome: Outcome, *counts: int, ties: int = 0, judged: str = "") -> Check:
    data: dict[str, Any] = {"checkpoint": "shop", "space": "vocab", "search": search, "judged": judged}
    data["reference"] = reference
    rows = []
    if counts:
        tie = {"case": "free-3", "n": 7, "gap": 3e-6, "reason": "rank 2"}
        data |= {"lists": sum(counts), "worst_score_difference": 2.5e-6, "near_ties": [tie] * ties}
        data["tie_rate"] = [9, 10] if judged else [3, 200]
        rows = [{"n": 7, "equal": counts[0], "near-tie": ties, "different": counts[-1] if len(counts) > 1 else 0}]
    return Check("parity", f"{reference}, vocab, {search}", outcome, "", reason="why", data=data, rows=rows)


def test_one_row_holds_what_each_reference_said() -> None:
    table, ties = overview(
        [
            compared("transformers", "no catalog", Outcome.PASS, 39),
            compared("SGLang", "no catalog", Outcome.NOT_RUN),
            compared("float64 oracle", "filters", Outcome.PASS, 12, 0, ties=1),
            Check("parity", "SGLang against transformers", Outcome.PASS, ""),
        ]
    )
    assert table.rows == [
        {
            "checkpoint": "shop",
            "space": "vocab",
            "search": "no catalog",
            "transformers": "39 of 39 equal; 2.5e-06",
            "SGLang": "not run",
            "float64 oracle": "",
        },
        {
            "checkpoint": "shop",
            "space": "vocab",
            "search": "filters",
            "transformers": "",
            "SGLang": "",
            "float64 oracle": "12 of 12 equal, 1 near-tie; 2.5e-06",
        },
    ]
    assert (table.outcome, table.printed) == (Outcome.PASS, True)
    assert table.summary == "51 lists in 2 comparisons, 1 comparisons not run"
    assert [(row["list"], row["float64 gap"]) for row in ties.rows] == [("free-3", "3e-06")]
    assert ties.summary.startswith("1 of 51 lists")


def test_a_difference_is_in_the_table_and_makes_it_red() -> None:
    differing = compared("transformers", "no catalog", Outcome.FAIL, 37, 2, judged="bfloat16 on a GPU")
    table, _ = overview([differing, compared("SGLang", "no catalog", Outcome.PASS, 39)])
    assert table.outcome is Outcome.FAIL
    assert table.reason == "transformers, vocab, no catalog: why"
    assert table.rows[0]["transformers"] == "37 of 39 equal, 2 DIFFER; 2.5e-06"
    assert [row["judged"] for row in table.rows] == ["bfloat16 on a GPU", ""]


@pytest.mark.parametrize(
    ("comparisons", "lists", "ties", "outcome"),
    [(18, 18, 18, Outcome.FAIL), (18, 18, 4, Outcome.PASS), (18, 18, 5, Outcome.FAIL), (3, 10, 1, Outcome.PASS)],
)
def test_single_near_ties_in_many_small_comparisons_add_up(
    comparisons: int, lists: int, ties: int, outcome: Outcome
) -> None:
    """18 comparisons of 18 lists are 324: 3 in 200 of them are 4.86, so four may fall the other way."""
    checks = [
        compared("float64 oracle", f"search {number}", Outcome.PASS, lists, ties=int(number < ties))
        for number in range(comparisons)
    ]
    found = overview(checks)[1]
    assert found.outcome is outcome
    assert found.summary.startswith(f"{ties} of {comparisons * lists} lists (")
    assert bool(found.reason) == (outcome is Outcome.FAIL)


def test_each_subject_has_a_cap_of_its_own() -> None:
    exact = [compared("SGLang", str(number), Outcome.PASS, 18, ties=1) for number in range(2)]
    rounded = compared("SGLang", "2", Outcome.PASS, 18, ties=16, judged="bfloat16")
    found = overview([*exact, rounded])[1]
    assert found.outcome is Outcome.FAIL
    assert found.reason == "2 of 36 lists (1 allowed) fell the other way"
    assert found.summary.endswith("; bfloat16: 16 of 18 lists (16 allowed)")


def test_where_nothing_was_compared_the_overview_is_not_run() -> None:
    table, ties = overview([compared("SGLang", "no catalog", Outcome.NOT_RUN)])
    assert {table.outcome, ties.outcome} == {Outcome.NOT_RUN}
    assert overview([Check("parity", "checkpoint as it was", Outcome.INVALID, "")]) == []
