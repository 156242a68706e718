"""How far apart two engines are on the same rows: a paired bootstrap over users."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
RESAMPLES = 10_000
_BATCH = 500
_UNSEEN = 3.0
"""An event that N users never showed happens to fewer than 3/N of them, at 95 % (the rule of three)."""

Rows = NDArray[np.float64]
Verdict = Literal["equal", "worse", "better", "undecided"]


@dataclass(frozen=True, slots=True)
class Interval:
    """Mean difference of a metric over rows, its interval, and how many rows differ at all."""

    difference: float
    low: float
    high: float
    rows: int
    users: int
    differing: int

    def verdict(self, bound: float) -> Verdict:
        """``equal``: the interval lies within ``bound`` of 0. ``worse`` or ``better``: it excludes 0, and the
        difference exceeds the bound. Else the rows do not decide."""
        if -bound <= self.low and self.high <= bound:
            return "equal"
        if self.high < 0 and self.difference < -bound:
            return "worse"
        return "better" if self.low > 0 and self.difference > bound else "undecided"


def paired_intervals(
    one: Mapping[str, Rows],
    other: Mapping[str, Rows],
    users: NDArray[np.int64],
    *,
    seed: int,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
) -> dict[str, Interval]:
    """Percentile bootstrap of the mean of ``one - other``, for every metric from the same resamples.

    A metric holds a value per row. Users are drawn with replacement, each with all rows of theirs: a user's rows
    overlap in time, so users and not rows are the unit (a cluster bootstrap; Davison, Hinkley, *Bootstrap Methods and
    their Application*, 1997, ch. 3.8). Where no row differs the interval is 3 / users on either side: resampling
    nothing shows nothing about the users that were not asked.
    """
    differences = {name: values - other[name] for name, values in one.items()}
    _, cluster = np.unique(users, return_inverse=True)
    sums: Rows = np.stack([np.bincount(cluster, weights=values) for values in differences.values()], axis=1)
    sizes = np.bincount(cluster).astype(np.float64)
    means = _resampled(sums, sizes, seed, resamples)
    tail = (1 - confidence) / 2
    bounds = np.quantile(means, (tail, 1 - tail), axis=0)
    return {
        name: _interval(values, float(low), float(high), len(sizes))
        for (name, values), low, high in zip(differences.items(), *bounds, strict=True)
    }


def _resampled(sums: Rows, sizes: Rows, seed: int, resamples: int) -> Rows:
    """float64 ``[resamples, metrics]``: means over users drawn anew, ``sums`` ``[users, metrics]``."""
    rng = np.random.default_rng(seed)
    users = len(sizes)
    out = []
    for first in range(0, resamples, _BATCH):
        drawn = rng.integers(0, users, (min(_BATCH, resamples - first), users))
        counts = np.stack([np.bincount(row, minlength=users) for row in drawn]).astype(np.float64)
        out.append((counts @ sums) / (counts @ sizes)[:, None])
    return np.concatenate(out)


def _interval(difference: Rows, low: float, high: float, users: int) -> Interval:
    differing = int(np.count_nonzero(difference))
    unseen = 0.0 if differing else _UNSEEN / users
    return Interval(float(difference.mean()), low - unseen, high + unseen, len(difference), users, differing)
