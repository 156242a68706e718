"""The statistics of performance verdicts: log-ratios, noise bands, paired intervals, Holm, power.

Times and rates are compared as log-ratios: a slowdown and the speed-up that undoes it are then equally far
from 0, and the noise of a ratio does not depend on the unit. The unit of replication is the server process:
rounds within one process share its memory layout and clocks, and are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import scipy  # whose modules come when they are first used: scipy.stats takes 1.5 s

FLOOR = 0.01
"""Smallest change worth a verdict, as a log-ratio: what an A/A run shows between sessions to start with."""
BAND_WIDTH = 2.0
"""``k``: the noise band in standard deviations of the difference."""
SCREEN_ALPHA = 0.03
"""Chance of any false rejection among a workload's metrics: simulated, 0.3 % to 2 % of equal sessions."""
CONFIDENCE = 0.99
TARGET_EFFECT = 0.03
"""The slowdown (log-ratio) that paired rounds are planned to detect, and that *within noise* excludes."""
SPREAD_CONFIDENCE = 0.75
"""Of the bound on the pairs' spread that the number of pairs is planned with."""
MIN_PAIRS = 5
MAX_PAIRS = 20


def log_ratio(new: float, base: float) -> float:
    """``ln(new / base)``. Raises ``ValueError`` unless both are positive."""
    if not (new > 0 and base > 0):
        raise ValueError(f"a log-ratio needs positive values, got {new!r} and {base!r}")
    return math.log(new / base)


def percent(log_change: float) -> float:
    """A log-ratio as a change in percent: ``ln 1.05`` becomes 5."""
    return math.expm1(log_change) * 100


def geometric_mean(values: Sequence[float]) -> float:
    """The centre that belongs to log-ratios; all values positive."""
    return math.exp(float(np.mean(np.log(np.asarray(values, dtype=np.float64)))))


def _sample_sd(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Spread:
    """Centre (in the metric's unit) and noise (standard deviations of logs) of a set of sessions.

    ``between_sessions`` is what the sessions' centres vary beyond what their processes explain.
    """

    centre: float
    within_session: float
    between_sessions: float
    sessions: int
    processes: int


def spread(sessions: Sequence[Sequence[float]]) -> Spread:
    """Variance components of process medians, grouped by session; all values positive.

    One-way random-effects analysis of variance on the logs, by moments: the variance of session means
    minus what the processes' own variance contributes to it, not below 0 (Searle, Casella, McCulloch,
    *Variance Components*, 1992, ch. 3). The centre is the geometric mean of the sessions' means.
    """
    logs = [np.log(np.asarray(values, dtype=np.float64)) for values in sessions]
    counts = [len(values) for values in logs]
    means = [float(values.mean()) for values in logs]
    freedom = sum(counts) - len(counts)
    squares = sum(float(((values - mean) ** 2).sum()) for values, mean in zip(logs, means, strict=True))
    within = math.sqrt(squares / freedom) if freedom else 0.0
    explained = within**2 * float(np.mean([1 / count for count in counts]))
    between = math.sqrt(max(0.0, _sample_sd(means) ** 2 - explained))
    centre = math.exp(float(np.mean(means)))
    return Spread(centre, within, between, len(logs), sum(counts))


def band(base: Spread, processes: int, *, floor: float = FLOOR, k: float = BAND_WIDTH) -> float:
    """Half-width of the noise band of a new session of ``processes`` against ``base``, as a log-ratio.

    ``max(floor, k * sqrt(s_session^2 * (1 + 1/S) + s_process^2 / P))``: the new session and the mean of
    the ``S`` stored ones both carry session noise, and the new one is a mean of ``P`` processes.
    """
    noise = math.sqrt(base.between_sessions**2 * (1 + 1 / base.sessions) + base.within_session**2 / processes)
    return max(floor, k * noise)


def screen_p_value(change: float, half_band: float, sessions: int, *, k: float = BAND_WIDTH) -> float:
    """One-sided p-value of a change for the worse (``change`` > 0), the band taken as ``k`` deviations.

    Student's t with as many degrees of freedom as there are stored ``sessions``: the band comes from few of
    them, and a normal law would raise an alarm in 6 % of equal sessions (simulated, 3 sessions of 3 processes).
    """
    return float(scipy.stats.t.sf(change * k / half_band, sessions))


def holm(p_values: Mapping[str, float], alpha: float = SCREEN_ALPHA) -> dict[str, bool]:
    """Which hypotheses are rejected, the chance of *any* false rejection being at most ``alpha``.

    S. Holm, *A simple sequentially rejective multiple test procedure*, Scand. J. Statist. 6 (1979).
    """
    rejected = dict.fromkeys(p_values, False)
    for step, (name, p) in enumerate(sorted(p_values.items(), key=lambda pair: pair[1])):
        if p > alpha / (len(p_values) - step):
            break
        rejected[name] = True
    return rejected


def screen_detectable(
    half_band: float, sessions: int, *, k: float = BAND_WIDTH, alpha: float = SCREEN_ALPHA, metrics: int = 1
) -> float:
    """Smallest true change (log-ratio) that the screen rejects with 95 % power, Holm's first step."""
    critical = float(scipy.stats.t.isf(alpha / metrics, sessions))
    return half_band / k * (critical + float(scipy.stats.norm.isf(0.05)))


@dataclass(frozen=True, slots=True)
class PairedInterval:
    """Mean log-ratio of pairs with its two-sided confidence interval."""

    mean: float
    low: float
    high: float
    pair_sd: float
    pairs: int


def abba_order(pairs: int) -> str:
    """The interleaving ``ABBAABBA...``: a linear drift of the machine cancels within every two pairs.

    The A-B-B-A layout is that of weighing designs; each pair is one A and one B that run back to back.
    """
    return "".join("AB" if pair % 2 == 0 else "BA" for pair in range(pairs))


def paired_interval(a: Sequence[float], b: Sequence[float], *, confidence: float = CONFIDENCE) -> PairedInterval:
    """Student's t interval of ``ln(b / a)`` over pairs. Raises ``ValueError`` below two pairs."""
    if len(a) != len(b) or len(a) < 2:
        raise ValueError(f"paired samples need equal lengths of at least 2, got {len(a)} and {len(b)}")
    ratios = [log_ratio(new, base) for base, new in zip(a, b, strict=True)]
    mean, sd = float(np.mean(ratios)), _sample_sd(ratios)
    half = float(scipy.stats.t.ppf(0.5 + confidence / 2, len(ratios) - 1)) * sd / math.sqrt(len(ratios))
    return PairedInterval(mean, mean - half, mean + half, sd, len(ratios))


def paired_p_value(interval: PairedInterval) -> float:
    """Two-sided p-value of "no change", by Student's t; with one metric, below 1 % where the interval excludes 0."""
    error = interval.pair_sd / math.sqrt(interval.pairs)
    if error == 0:
        return 1.0 if interval.mean == 0 else 0.0
    return 2 * float(scipy.stats.t.sf(abs(interval.mean) / error, interval.pairs - 1))


Verdict = Literal["slower", "faster", "within noise", "inconclusive"]


def paired_verdict(
    interval: PairedInterval, *, rejected: bool, floor: float = FLOOR, worse: Literal[1, -1] = 1
) -> Verdict:
    """Decide from an interval of log-ratios; ``worse`` is the sign that is bad (+1 for times).

    ``rejected``: Holm's procedure over all gated metrics rejects "no change". Slower or faster only then, and
    only if the mean exceeds the floor. Otherwise *within noise* if the interval excludes a change for the worse
    of :data:`TARGET_EFFECT` (a gain there is no gain), else the pairs do not decide.
    """
    if rejected and abs(interval.mean) > floor:
        return "slower" if interval.mean * worse > 0 else "faster"
    furthest_worse = interval.high if worse > 0 else -interval.low
    return "within noise" if furthest_worse < TARGET_EFFECT else "inconclusive"


def paired_detectable(
    pair_sd: float,
    pairs: int,
    *,
    comparisons: int = 1,
    floor: float = FLOOR,
    confidence: float = CONFIDENCE,
    power: float = 0.95,
) -> float:
    """Smallest true change (log-ratio) that ``pairs`` pairs reject with ``power``.

    The change whose t statistic, noncentral, exceeds the critical value of Holm's first step over
    ``comparisons`` metrics; not below the floor plus what the power needs above it.
    """
    error = pair_sd / math.sqrt(pairs)
    shift = _rejected_shift(pairs, (1 - confidence) / comparisons, power)
    return max(shift * error, floor + float(scipy.stats.norm.ppf(power)) * error)


@lru_cache(maxsize=1024)
def _rejected_shift(pairs: int, alpha: float, power: float) -> float:
    """The true mean, in standard errors, that a two-sided t test at ``alpha`` rejects with ``power``."""
    critical = float(scipy.stats.t.isf(alpha / 2, pairs - 1))

    def excess(shift: float) -> float:
        return float(scipy.stats.nct.sf(critical, pairs - 1, shift)) - power

    return float(scipy.optimize.brentq(excess, critical / 2, 6 * critical))


def pairs_needed(pair_sd: float, effect: float, *, comparisons: int = 1, floor: float = FLOOR) -> int | None:
    """Fewest pairs, ``MIN_PAIRS`` to ``MAX_PAIRS``, that detect ``effect``; ``None`` if none does."""
    for pairs in range(MIN_PAIRS, MAX_PAIRS + 1):
        if paired_detectable(pair_sd, pairs, comparisons=comparisons, floor=floor) <= effect:
            return pairs
    return None


def spread_bound(sample_sd: float, count: int, *, confidence: float = SPREAD_CONFIDENCE) -> float:
    """Upper confidence bound of a standard deviation seen in ``count`` normal values, by chi-square.

    Five pairs underestimate their spread half of the time; planning with the bound keeps the power (simulated
    at a pair spread of 2 %: 94 % with the estimate, 98 % with this).
    """
    return sample_sd * math.sqrt((count - 1) / float(scipy.stats.chi2.ppf(1 - confidence, count - 1)))


def trend(values: Sequence[float]) -> float:
    """Theil-Sen slope of ``ln(value)`` per step: the median of all pairwise slopes (Sen, 1968).

    Tells a process that warms up or throttles while it is measured from one that is merely noisy.
    """
    if len(values) < 2:
        return 0.0
    return float(scipy.stats.theilslopes(np.log(np.asarray(values, dtype=np.float64))).slope)
