"""When an overload's rounds decide: looks at an interval of the ratio, as many as were planned beforehand.

The question is whether goodput is at least :data:`KEPT` of the capacity. Rounds come in groups; after each group the
ratios so far give a two-sided interval (Student's t on their logarithms). It lies at or above :data:`KEPT` with its
lower end: pass. It lies below with its upper end: fail. Otherwise another group follows, up to the last look, which
leaves it open.

Clients that run on the server's cores take from it what their load costs them, and a server cannot be blamed for that.
What it would have done without is bounded: the engine computes on one core, so clients that keep ``x`` cores busier
under overload than around it cost at most the share ``x`` of the goodput. A pass is given by the ratios as measured, a
fail by the ratios divided by ``1 - x``; clients on cores of their own have ``x = 0``.

Looking again and again at 95 % intervals would be wrong far more often than 5 % of the time, so each of ``looks``
intervals has a confidence of 1 - 0.05 / ``looks`` (Bonferroni): with 95 % certainty all of them hold the true ratio,
hence the one that decided as well. A server below :data:`KEPT` passes, and one above fails, at most 2.5 % of the time
each.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence

import scipy  # whose modules come when they are first used

from flashrec_harness.outcome import Outcome

KEPT = 0.9
"""Share of the capacity that goodput may not fall below."""
ERROR = 0.05
"""Chance that any interval of a run misses the true ratio."""


def interval(ratios: Sequence[float], looks: int) -> tuple[float, float]:
    """One look's interval of the mean ratio, on the logarithms; two ratios or more."""
    logs = [math.log(max(ratio, 1e-9)) for ratio in ratios]
    centre = statistics.fmean(logs)
    deviation = math.sqrt(math.fsum((one - centre) ** 2 for one in logs) / (len(logs) - 1))
    half = _quantile(looks, len(logs)) * deviation / math.sqrt(len(logs))
    return math.exp(centre - half), math.exp(centre + half)


@functools.cache
def _quantile(looks: int, count: int) -> float:
    """Student's t for one of ``looks`` two-sided intervals from ``count`` values."""
    return float(scipy.stats.t.ppf(1 - ERROR / looks / 2, count - 1))


def verdict(ratios: Sequence[float], at_most: Sequence[float], looks: int) -> Outcome:
    """What one of ``looks`` looks says of ``ratios`` as measured and ``at_most`` without the clients' cost:
    *inconclusive* asks for more rounds."""
    if interval(ratios, looks)[0] >= KEPT:
        return Outcome.PASS
    return Outcome.FAIL if interval(at_most, looks)[1] < KEPT else Outcome.INCONCLUSIVE
