"""From rounds to checks: throughput by paired intervals, answers by their number and their bits."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from flashrec_harness import stats
from flashrec_harness.determinism.ledger_diff import first_beam
from flashrec_harness.httpcost.figures import SUITE, fill, with_figures
from flashrec_harness.httpcost.measure import Measured
from flashrec_harness.outcome import Check, Outcome

KEPT = 0.9
"""Share of the throughput in process that HTTP must keep."""
CONFIDENCE = 0.95
_SHOWN = 20


def share_kept(inside: Sequence[float], http: Sequence[float]) -> tuple[float, float, float]:
    """Mean ratio HTTP to in process over the pairs of rounds, and its interval (Student's t on the logarithms).

    Raises ``ValueError`` below two pairs, or where a rate is not positive.
    """
    found = stats.paired_interval(inside, http, confidence=CONFIDENCE)
    return math.exp(found.mean), math.exp(found.low), math.exp(found.high)


def throughput(found: Measured) -> Check:
    """Whether HTTP keeps :data:`KEPT` at one point: *inconclusive* where the interval holds it, or is none."""
    name = f"HTTP keeps {KEPT:.0%} of in-process: {found.point.name}"
    http, inside = [half.rate for half in found.http], [half.rate for half in found.inside]
    figures = f"{statistics.median(http):.4g} of {statistics.median(inside):.4g} req/s (medians of {len(http)} rounds; "
    figures += f"lockstep {found.lockstep:.4g}); {fill(found)}"
    if not all(rate > 0 for rate in (*http, *inside)):
        return with_figures(
            Check(SUITE, name, Outcome.INVALID, figures, "a round has too few answers for a rate"), found
        )
    if len(http) < 2:
        reason = f"one round, ratio {http[0] / inside[0]:.3f}, has no interval: run --rounds 2 or more"
        return with_figures(Check(SUITE, name, Outcome.INCONCLUSIVE, figures, reason), found)
    mean, low, high = share_kept(inside, http)
    outcome = Outcome.PASS if low >= KEPT else Outcome.FAIL if high < KEPT else Outcome.INCONCLUSIVE
    reason = f"HTTP keeps {low:.3f} to {high:.3f} of the throughput in process"
    if outcome is Outcome.INCONCLUSIVE:
        reason += ": run more --rounds, longer --seconds, or on a quieter machine"
    check = Check(
        SUITE,
        name,
        outcome,
        f"{mean:.3f} ({CONFIDENCE:.0%} interval {low:.3f} to {high:.3f}, wanted from {KEPT:g} on): {figures}",
        reason="" if outcome is Outcome.PASS else reason,
    )
    return with_figures(check, found)


def arrived(every: Sequence[Measured], woken: Counter[int]) -> Check:
    """Whether each request over HTTP got a 200, those of the warm-up as well, and those before any point: ``woken``."""
    by_point = {one.point.name: sum((half.statuses for half in one.http), Counter(one.warm_up)) for one in every}
    by_point |= {"before all points": woken}
    total = sum(by_point.values(), Counter[int]())
    bad = total.total() - total[200]
    rows = [
        {"point": name, **{str(status): count for status, count in sorted(found.items())}}
        for name, found in by_point.items()
        if found.total() > found[200]
    ]
    return Check(
        SUITE,
        "every answer arrived",
        Outcome.FAIL if bad else Outcome.PASS if total[200] else Outcome.INVALID,
        f"{total[200]} of {total.total()} requests over {len(every)} points were answered 200",
        reason=f"{bad} were not; statuses {dict(sorted(total.items()))} (0: no answer)" if bad else "",
        rows=rows,
    )


def same_answers(every: Sequence[Measured]) -> Check:
    """Whether answers over HTTP, under load, have the tokens and score bits that the same prompts got in process."""
    compared, different, blind = 0, list[dict[str, Any]](), list[str]()
    for one in every:
        before = compared
        for number, (http, inside) in enumerate(zip(one.http, one.inside, strict=True)):
            for place in sorted(http.kept.keys() & inside.kept.keys()):
                compared += 1
                if http.kept[place] != inside.kept[place]:
                    output = first_beam(inside.kept[place], http.kept[place])
                    different.append(
                        {"point": one.point.name, "round": number + 1, "request": str(place), "what": output}
                    )
        blind += [one.point.name] * (compared == before)
    reason = f"{different[0]['point']}: {different[0]['what']}" if different else ""
    if blind and not different:
        reason = f"no answer was compared at {', '.join(blind)}"
    return Check(
        SUITE,
        "answers are those given in process",
        Outcome.FAIL if different else Outcome.INVALID if blind or not every else Outcome.PASS,
        f"{len(different)} of {compared} answers under load differ in tokens or score bits, {len(every)} points",
        reason=reason,
        rows=different[:_SHOWN],
    )
