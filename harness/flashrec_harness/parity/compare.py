"""The verdict on one list: equal, a near-tie that fell the other way, or different."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from flashrec_harness.references.oracle import Explanation
from flashrec_harness.references.types import Hypothesis, RankedList, SearchCase

Explain = Callable[[SearchCase, RankedList, float], Explanation]
"""Says whether a list is one that the float64 search could return, were gaps below the band to fall otherwise."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Float32 on a CPU: scores within ``score``; near-ties below ``tie_gap``, at most ``ties`` in ``lists``."""

    score: float = 1e-4
    tie_gap: float = 5e-5
    ties: int = 3
    lists: int = 200

    def allowed_ties(self, count: int) -> int:
        """Near-ties that ``count`` lists may hold: the stated rate, but a single one anywhere.

        It caps one comparison, and once more all comparisons of a subject together.
        """
        return max(1, self.ties * count // self.lists)


class Agreement(StrEnum):
    """What a list turned out to be."""

    EQUAL = "equal"
    NEAR_TIE = "near-tie"
    DIFFERENT = "different"
    UNDECIDED = "undecided"
    """The choices differ, and there is no float64 search to judge by how much."""


@dataclass(frozen=True, slots=True)
class ListVerdict:
    """One list against its reference. ``score_error`` is the largest difference over common hypotheses."""

    case: SearchCase
    ours: RankedList
    theirs: RankedList
    agreement: Agreement
    score_error: float
    gap: float = 0.0
    reason: str = ""


def compare_lists(
    case: SearchCase,
    ours: RankedList,
    theirs: RankedList,
    tolerance: Tolerance,
    explain: Explain | None,
) -> ListVerdict:
    """Judge ``ours`` by ``theirs``.

    Equal means the same hypotheses in the same order. Where they differ, both lists must be outcomes that
    the float64 search reaches when candidates closer than ``tolerance.tie_gap`` change places.
    """
    error = score_error(ours, theirs)
    if broken := malformed(ours):
        return ListVerdict(case, ours, theirs, Agreement.DIFFERENT, error, reason=broken)
    same = [h.token_ids for h in ours] == [h.token_ids for h in theirs]
    if not error <= tolerance.score:
        reason = f"scores differ by {error:.3g}, {tolerance.score:g} is allowed"
        if not same:
            reason = f"{first_difference(ours, theirs)}; {reason}"
        return ListVerdict(case, ours, theirs, Agreement.DIFFERENT, error, reason=reason)
    if same:
        return ListVerdict(case, ours, theirs, Agreement.EQUAL, error)
    where = first_difference(ours, theirs)
    if explain is None:
        return ListVerdict(case, ours, theirs, Agreement.UNDECIDED, error, reason=where)
    explained = [explain(case, ranked, tolerance.tie_gap) for ranked in (ours, theirs)]
    gap = max(explanation.gap for explanation in explained)
    faults = [
        f"{who}: {explanation.reason}"
        for who, explanation in zip(("ours", "the reference"), explained, strict=True)
        if not explanation.holds
    ]
    if faults:
        reason = f"{where}; {'; '.join(faults)}"
        return ListVerdict(case, ours, theirs, Agreement.DIFFERENT, error, gap, reason)
    return ListVerdict(case, ours, theirs, Agreement.NEAR_TIE, error, gap, f"{where}, {gap:.2g} apart")


def score_error(ours: RankedList, theirs: RankedList) -> float:
    """Largest difference in score or in sum between hypotheses that both lists hold; NaN is an infinity."""
    known = {h.token_ids: h for h in theirs}
    pairs = [(h, known[h.token_ids]) for h in ours if h.token_ids in known]
    differences = [abs(mine.score - other.score) for mine, other in pairs]
    differences += [abs(mine.cumulative - other.cumulative) for mine, other in pairs]
    return max((math.inf if math.isnan(d) else d for d in differences), default=0.0)


def malformed(ranked: RankedList) -> str:
    """What is wrong with a list whatever the reference says: a repeated hypothesis, a rising score."""
    seen: dict[tuple[int, ...], int] = {}
    for rank, hypothesis in enumerate(ranked, start=1):
        if hypothesis.token_ids in seen:
            return f"ranks {seen[hypothesis.token_ids]} and {rank} are the same hypothesis {hypothesis.token_ids}"
        seen[hypothesis.token_ids] = rank
        if rank > 1 and hypothesis.score > ranked[rank - 2].score:
            return f"rank {rank} scores above rank {rank - 1}"
    return ""


def first_difference(ours: RankedList, theirs: RankedList) -> str:
    """The first rank at which the lists differ, with both sides."""
    for rank in range(max(len(ours), len(theirs))):
        mine, other = _at(ours, rank), _at(theirs, rank)
        if mine is None or other is None or mine.token_ids != other.token_ids:
            return f"rank {rank + 1}: {_text(mine)} where the reference has {_text(other)}"
    return "no difference"


def _at(ranked: RankedList, rank: int) -> Hypothesis | None:
    return ranked[rank] if rank < len(ranked) else None


def _text(hypothesis: Hypothesis | None) -> str:
    return "nothing" if hypothesis is None else f"{hypothesis.token_ids} ({hypothesis.score:.6f})"
