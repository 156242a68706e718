"""The whole suite at a glance: every reference side by side, and every near-tie that fell the other way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flashrec_harness.outcome import Check, Outcome, worst
from flashrec_harness.parity.compare import Tolerance
from flashrec_harness.parity.comparison import SUITE
from flashrec_harness.parity.plan import Reference

_PRINTED = 20
"""Near-ties that a terminal still lists: in low precision there are hundreds, and the report has them all."""
_KEYS = ("checkpoint", "space", "search", "judged")


def overview(checks: Sequence[Check]) -> list[Check]:
    """Two checks over the comparisons among ``checks``: a table of all references, and the list of near-ties."""
    compared = [check for check in checks if "reference" in check.data]
    return [side_by_side(compared), near_ties(compared)] if compared else []


def side_by_side(compared: Sequence[Check]) -> Check:
    """A row per kind of search, a column per reference: lists equal, near-ties, differences, worst score error."""
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for check in compared:
        key = tuple(check.data[name] for name in _KEYS)
        row = rows.setdefault(key, dict(zip(_KEYS, key, strict=True)) | dict.fromkeys(map(str, Reference), ""))
        row[check.data["reference"]] = _cell(check)
    if not any(row["judged"] for row in rows.values()):
        for row in rows.values():
            del row["judged"]
    absent = [check for check in compared if check.outcome is Outcome.NOT_RUN]
    outcome = worst(check.outcome for check in compared if check.outcome is not Outcome.NOT_RUN)
    red = [check for check in compared if check.outcome is outcome and outcome is not Outcome.PASS]
    lists = sum(check.data.get("lists", 0) for check in compared)
    return Check(
        SUITE,
        "references side by side",
        outcome,
        f"{lists} lists in {len(compared) - len(absent)} comparisons, {len(absent)} comparisons not run",
        reason=f"{red[0].name}: {red[0].reason}" if red else "",
        rows=list(rows.values()),
        printed=True,
    )


def _cell(check: Check) -> str:
    if "lists" not in check.data:
        return str(check.outcome)
    equal, ties, different = (sum(row[name] for row in check.rows) for name in ("equal", "near-tie", "different"))
    parts = [f"{equal} of {check.data['lists']} equal"]
    parts += [f"{ties} near-tie{'s' * (ties > 1)}"] * bool(ties) + [f"{different} DIFFER"] * bool(different)
    return f"{', '.join(parts)}; {check.data['worst_score_difference']:.1e}"


def near_ties(compared: Sequence[Check]) -> Check:
    """Every list that differs by choices whose float64 scores are closer than the band: where, and how close.

    A comparison may hold one whatever its size; over all of a subject's lists the stated rate holds, so that many
    small comparisons do not add up to many.
    """
    rows = [
        {
            "comparison": check.name,
            "list": tie["case"],
            "n": tie["n"],
            "float64 gap": f"{tie['gap']:.2g}",
            "first difference": tie["reason"],
        }
        for check in compared
        for tie in check.data.get("near_ties", ())
    ]
    counts = _tie_counts(compared)
    excess = [f"{one.text()} fell the other way" for one in counts if one.ties > one.allowed]
    outcome = Outcome.NOT_RUN if not counts else Outcome.FAIL if excess else Outcome.PASS
    return Check(
        SUITE,
        "near-ties that fell the other way",
        outcome,
        "; ".join(one.text() for one in counts),
        reason="; ".join(excess) if counts else "nothing was compared",
        rows=rows,
        printed=len(rows) <= _PRINTED,
    )


@dataclass(frozen=True, slots=True)
class _TieCount:
    """The near-ties in all lists of one subject."""

    judged: str
    ties: int
    lists: int
    allowed: int

    def text(self) -> str:
        who = f"{self.judged}: " if self.judged else ""
        return f"{who}{self.ties} of {self.lists} lists ({self.allowed} allowed)"


def _tie_counts(compared: Sequence[Check]) -> list[_TieCount]:
    """Per subject that was compared at all, in the order of the checks."""
    counts = []
    for judged in dict.fromkeys(check.data["judged"] for check in compared if check.data.get("lists")):
        own = [check.data for check in compared if check.data["judged"] == judged and check.data.get("lists")]
        lists = sum(data["lists"] for data in own)
        ties, per = own[0]["tie_rate"]
        allowed = Tolerance(ties=ties, lists=per).allowed_ties(lists)
        counts.append(_TieCount(judged, sum(len(data["near_ties"]) for data in own), lists, allowed))
    return counts
