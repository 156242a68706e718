"""Rounds of one operating point: HTTP and in process in turn, with the same prompts."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from flashrec_harness import stats
from flashrec_harness.httpcost.bits import Kept
from flashrec_harness.httpcost.cells import TAIL_REQUESTS, Point, Seed, Share, shares
from flashrec_harness.httpcost.gauge import Gauge
from flashrec_harness.httpcost.sides import InProcess, Side
from flashrec_harness.overload.fleet import steady_rate

_LEAST_WAVES = 8
_WARM_UP_WAVES = 4
_WARM_WAVES, _WAVES = 2, 5
_LOCKSTEP_TURNS = 1000
"""Far above those of the rounds."""


@dataclass(frozen=True, slots=True)
class Half:
    """One side of a round: answers per second, milliseconds of each as they came, how many of each status, requests per
    wave, prompt tokens found cached, CPU milliseconds per request of each process, the answers that are compared, and
    what the machine's own :class:`.gauge.Gauge` took meanwhile, in milliseconds.
    """

    rate: float
    latencies_ms: list[float]
    statuses: Counter[int]
    per_wave: float = 0.0
    hit_tokens: int = 0
    cpu_ms: Mapping[str, float] = field(default_factory=dict)
    kept: Kept = field(default_factory=dict)
    gauge_ms: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Measured:
    """All rounds of a point: ``http[i]`` ran next to ``inside[i]``. ``lockstep`` is requests per second of waves, one
    after the other, without a scheduler; ``warm_up`` counts the statuses of requests that are not in the rounds."""

    point: Point
    lockstep: float
    http: list[Half] = field(default_factory=list)
    inside: list[Half] = field(default_factory=list)
    warm_up: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Loads:
    """Makes loads of prompts that are sent once: for ``clients`` clients, from ``vocabulary`` token ids."""

    seed: int
    clients: int
    vocabulary: int
    max_tokens: int | None

    def load(self, point: Point, requests: int, *, turn: int) -> list[Share]:
        """One of a point's loads; ``turn`` tells it from the others."""
        place: Seed = (self.seed, point.context, point.n, point.concurrency, turn)
        return shares(point, place, requests, self.clients, vocabulary=self.vocabulary, max_tokens=self.max_tokens)

    def wave(self, point: Point, *, turn: int) -> Share:
        """One wave's prompts."""
        place: Seed = (self.seed, point.context, point.n, point.concurrency, turn, 0)
        return Share(point, place, point.concurrency, point.concurrency, self.vocabulary, self.max_tokens)


def lockstep(inside: InProcess, point: Point, loads: Loads) -> float:
    """Requests per second by the median of a few waves, before the scheduler has the engine."""
    times = [inside.wave(loads.wave(point, turn=_LOCKSTEP_TURNS + number)) for number in range(_WARM_WAVES + _WAVES)]
    return point.concurrency / statistics.median(times[_WARM_WAVES:])


def measure(
    point: Point,
    served: Side,
    inside: Side,
    loads: Loads,
    *,
    pace: float,
    seconds: float,
    rounds: int,
    gauge: Gauge | None = None,
) -> Measured:
    """Warm both sides up, then ``rounds`` rounds ABBA of about ``seconds`` each at ``pace`` requests per second."""
    found = Measured(point, pace)
    least = -(-TAIL_REQUESTS // rounds) if point.concurrency == 1 else _LEAST_WAVES * point.concurrency
    requests = max(round(pace * seconds), least)
    warm_up = loads.load(point, max(round(pace * seconds / 4), _WARM_UP_WAVES * point.concurrency), turn=0)
    for side in (served, inside):
        found.warm_up += Counter(shot.status for shot in side.load(warm_up).shots)
    for place, letter in enumerate(stats.abba_order(rounds)):
        load = loads.load(point, requests, turn=1 + place // 2)
        if letter == "A":
            found.http.append(_half(served, load, gauge))
        else:
            found.inside.append(_half(inside, load, gauge))
    return found


def _half(side: Side, load: list[Share], gauge: Gauge | None) -> Half:
    before = side.counters()
    if gauge is not None:
        gauge.take()
    fired = side.load(load)
    steadiness = [] if gauge is None else gauge.take()
    after = side.counters()
    answered = [shot for shot in fired.shots if shot.status == 200]
    each = 1e3 / max(len(answered), 1)
    return Half(
        rate=steady_rate(answered),
        latencies_ms=[1e3 * shot.seconds for shot in answered],
        statuses=Counter(shot.status for shot in fired.shots),
        per_wave=len(answered) / max(after.waves - before.waves, 1),
        hit_tokens=after.hit_tokens - before.hit_tokens,
        cpu_ms={name: each * (spent - before.cpu_s.get(name, 0.0)) for name, spent in after.cpu_s.items()},
        kept=fired.kept,
        gauge_ms=steadiness,
    )
