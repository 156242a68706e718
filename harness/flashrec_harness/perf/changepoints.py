"""Where a series of figures changes its level: binary segmentation, each split tested by permutation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flashrec_harness.stats import FLOOR

ALPHA = 0.01
"""Chance of any change point in a series that has none."""
PERMUTATIONS = 999
SHORTEST = 2
"""Fewest figures of a level."""
FEWEST = 8
"""Fewest figures that are searched: of less than these no order is unlikely enough to be no accident."""

_Logs = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ChangePoint:
    """``index`` is the first figure of the new level; ``change`` the log-ratio of the new level to the old one."""

    index: int
    change: float


def find(values: Sequence[float], *, alpha: float = ALPHA, floor: float = FLOOR, seed: int = 0) -> list[ChangePoint]:
    """Change points of positive figures in their order in time, on their logarithms.

    Binary segmentation (Vostrikova, 1981): the split with the largest CUSUM statistic is kept if fewer than
    ``alpha`` of the series' permutations reach it, and both parts are searched again. Permutations need no law for
    the noise. A level that differs by less than ``floor`` from the one before is none: it joins it.
    """
    logs = np.log(np.asarray(values, dtype=np.float64))
    generator = np.random.default_rng(seed)
    starts = [0, *sorted(_splits(logs, 0, alpha, generator))]
    while (small := _smallest_step(logs, starts)) is not None and abs(small[1]) < floor:
        starts.remove(starts[small[0]])
    means = _levels(logs, starts)
    return [
        ChangePoint(start, after - before)
        for start, before, after in zip(starts[1:], means[:-1], means[1:], strict=True)
    ]


def _splits(logs: _Logs, offset: int, alpha: float, generator: np.random.Generator) -> list[int]:
    if len(logs) < FEWEST:
        return []
    scores = _cusum(logs[None, :])[0]
    shuffled = generator.permuted(np.tile(logs, (PERMUTATIONS, 1)), axis=1)
    reached = int((_cusum(shuffled).max(axis=1) >= scores.max()).sum())
    if (1 + reached) / (1 + PERMUTATIONS) > alpha:
        return []
    at = int(scores.argmax()) + SHORTEST
    before = _splits(logs[:at], offset, alpha, generator)
    return [*before, offset + at, *_splits(logs[at:], offset + at, alpha, generator)]


def _cusum(series: _Logs) -> _Logs:
    """For each row and each split: ``sqrt(n1 n2 / n) |mean1 - mean2|``."""
    length = series.shape[1]
    left = np.arange(SHORTEST, length - SHORTEST + 1)
    sums = series.cumsum(axis=1)
    before = sums[:, left - 1] / left
    after = (sums[:, -1:] - sums[:, left - 1]) / (length - left)
    result: _Logs = np.sqrt(left * (length - left) / length) * np.abs(before - after)
    return result


def _levels(logs: _Logs, starts: Sequence[int]) -> list[float]:
    return [float(part.mean()) for part in np.split(logs, starts[1:])]


def _smallest_step(logs: _Logs, starts: Sequence[int]) -> tuple[int, float] | None:
    """Position in ``starts`` and log-ratio of the smallest change of level."""
    means = _levels(logs, starts)
    steps = [(number, means[number] - means[number - 1]) for number in range(1, len(starts))]
    return min(steps, key=lambda step: abs(step[1]), default=None)


def levels(values: Sequence[float], points: Sequence[ChangePoint]) -> list[float]:
    """The geometric mean of each figure's level, one per figure: the line that a plot draws."""
    logs = np.log(np.asarray(values, dtype=np.float64))
    starts = [0, *(point.index for point in points)]
    stops = [*starts[1:], len(values)]
    means = _levels(logs, starts)
    return [math.exp(mean) for mean, a, b in zip(means, starts, stops, strict=True) for _ in range(a, b)]
