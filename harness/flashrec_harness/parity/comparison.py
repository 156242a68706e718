"""Many lists against one reference: the outcome, the figures per width, the differing lists side by side."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from flashrec_harness.outcome import Check, Outcome, Plot, Series
from flashrec_harness.parity.agreement import overlap, same_first, spearman
from flashrec_harness.parity.compare import Agreement, Explain, ListVerdict, Tolerance, compare_lists
from flashrec_harness.references.types import RankedList, SearchCase

SUITE = "parity"
_LISTED = 10


@dataclass(frozen=True, slots=True)
class Comparison:
    """The verdicts of all lists that were compared with one reference in one score space."""

    name: str
    tolerance: Tolerance
    verdicts: tuple[ListVerdict, ...]

    @classmethod
    def of(
        cls,
        name: str,
        cases: Sequence[SearchCase],
        ours: Sequence[RankedList],
        theirs: Sequence[RankedList],
        explain: Explain | None,
        tolerance: Tolerance | None = None,
    ) -> Comparison:
        """Compare list by list; ``cases``, ``ours`` and ``theirs`` go together."""
        tolerance = tolerance or Tolerance()
        triples = zip(cases, ours, theirs, strict=True)
        verdicts = (compare_lists(case, mine, other, tolerance, explain) for case, mine, other in triples)
        return cls(name, tolerance, tuple(verdicts))

    def having(self, agreement: Agreement) -> list[ListVerdict]:
        return [verdict for verdict in self.verdicts if verdict.agreement is agreement]

    def outcome(self) -> tuple[Outcome, str]:
        """The outcome and, where it is not a pass, why."""
        if not any(verdict.theirs for verdict in self.verdicts):
            return Outcome.INVALID, "no list with a hypothesis in it was compared"
        different = self.having(Agreement.DIFFERENT)
        if different:
            first = different[0]
            return Outcome.FAIL, f"{len(different)} lists differ; {first.case.name}: {first.reason}"
        ties = self.having(Agreement.NEAR_TIE)
        allowed = self.tolerance.allowed_ties(len(self.verdicts))
        if len(ties) > allowed:
            return Outcome.FAIL, f"{len(ties)} near-ties fell the other way, {allowed} are allowed"
        undecided = self.having(Agreement.UNDECIDED)
        if undecided:
            first = undecided[0]
            return Outcome.INCONCLUSIVE, (
                f"{len(undecided)} lists differ and no float64 search could judge by how much; "
                f"{first.case.name}: {first.reason}"
            )
        return Outcome.PASS, ""

    def check(self, *, plots: bool = True) -> Check:
        """The verdict with its evidence."""
        outcome, reason = self.outcome()
        return Check(
            suite=SUITE,
            name=self.name,
            outcome=outcome,
            summary=self.summary(),
            reason=reason,
            data={
                "lists": len(self.verdicts),
                "tie_rate": [self.tolerance.ties, self.tolerance.lists],
                "worst_score_difference": self.worst_score_error,
                "near_ties": [_listed(verdict) for verdict in self.having(Agreement.NEAR_TIE)],
                "different": [
                    _listed(verdict) | {"side_by_side": side_by_side(verdict)}
                    for verdict in self.having(Agreement.DIFFERENT)[:_LISTED]
                ],
            },
            rows=self.by_width(),
            plots=[self._score_plot()] if plots and self.verdicts else [],
        )

    @property
    def worst_score_error(self) -> float:
        return max((verdict.score_error for verdict in self.verdicts), default=0.0)

    def summary(self) -> str:
        """What was compared, how many, how close, and what it could not see."""
        count = len(self.verdicts)
        counts = {agreement: len(self.having(agreement)) for agreement in Agreement}
        named = ", ".join(
            f"{number} {agreement}" for agreement, number in counts.items() if number or agreement == "equal"
        )
        hypotheses = sum(len(verdict.theirs) for verdict in self.verdicts)
        gap = max((verdict.gap for verdict in self.having(Agreement.NEAR_TIE)), default=None)
        tie = "" if gap is None else f" (largest gap {gap:.2g})"
        unseen = f"; a fault in fewer than {min(1.0, 3 / count):.1%} of lists may be missed (95 %)" if count else ""
        return (
            f"{count} lists, {hypotheses} hypotheses, n {self._range('n')}, {self._range('max_tokens')} tokens"
            f"{self._stops()}: "
            f"{named}{tie}; worst score difference {self.worst_score_error:.2g}"
            f" ({self.tolerance.score:g} allowed){unseen}"
        )

    def by_width(self) -> list[dict[str, Any]]:
        """One table row per ``n``."""
        widths = sorted({verdict.case.n for verdict in self.verdicts})
        return [_width_row(width, [v for v in self.verdicts if v.case.n == width]) for width in widths]

    def _stops(self) -> str:
        """How many lists have stop tokens, and in how many some hypothesis ended at one before the last step."""
        stopping = [v for v in self.verdicts if v.case.stop_token_ids and v.case.catalog is None]
        reached = sum(any(len(h.token_ids) < v.case.max_tokens for h in v.theirs) for v in stopping)
        return f", {len(stopping)} with stop tokens ({reached} reached)" if stopping else ""

    def _range(self, field: str) -> str:
        values = [getattr(verdict.case, field) for verdict in self.verdicts]
        if not values:
            return "none"
        low, high = min(values), max(values)
        return str(low) if low == high else f"{low} to {high}"

    def _score_plot(self) -> Plot:
        points = [(verdict.case.n, verdict.score_error) for verdict in self.verdicts if verdict.score_error > 0]
        return Plot(
            title=f"{self.name}: score difference",
            x_label="n",
            y_label="largest difference in a list",
            series=[Series("lists", [float(x) for x, _ in points], [y for _, y in points])],
            log_y=True,
        )


def side_by_side(verdict: ListVerdict) -> list[dict[str, Any]]:
    """Rank by rank: our hypothesis and the reference's."""
    rows = []
    for rank, (mine, other) in enumerate(zip_longest(verdict.ours, verdict.theirs), start=1):
        rows.append(
            {
                "rank": rank,
                "ours": None if mine is None else list(mine.token_ids),
                "score": None if mine is None else mine.score,
                "reference": None if other is None else list(other.token_ids),
                "reference score": None if other is None else other.score,
            }
        )
    return rows


def _listed(verdict: ListVerdict) -> dict[str, Any]:
    case = verdict.case
    return {
        "case": case.name,
        "n": case.n,
        "tokens": case.max_tokens,
        "gap": verdict.gap,
        "reason": verdict.reason,
    }


def _width_row(width: int, verdicts: Sequence[ListVerdict]) -> dict[str, Any]:
    correlations = [rho for verdict in verdicts if (rho := spearman(verdict.ours, verdict.theirs)) is not None]
    return {
        "n": width,
        "lists": len(verdicts),
        **{
            agreement.value: sum(verdict.agreement is agreement for verdict in verdicts)
            for agreement in (Agreement.EQUAL, Agreement.NEAR_TIE, Agreement.DIFFERENT)
        },
        "top-1": f"{statistics.fmean(same_first(v.ours, v.theirs) for v in verdicts):.1%}",
        "overlap": f"{statistics.fmean(overlap(v.ours, v.theirs) for v in verdicts):.2%}",
        "Spearman": f"{statistics.fmean(correlations):.6f}" if correlations else "",
        "score difference": f"{max(v.score_error for v in verdicts):.2g}",
    }
