"""Sides of an `http-cost` that answer as they are told."""

from __future__ import annotations

from collections import Counter
from typing import Any

from flashrec_harness.determinism.records import OutputBeam, float_bits
from flashrec_harness.httpcost.cells import Point, Share, compared
from flashrec_harness.httpcost.measure import Half, Loads, Measured, measure
from flashrec_harness.httpcost.sides import Counters, Fired
from flashrec_harness.overload.fleet import Shot

AT_8, ALONE = Point(1000, 256, 8), Point(1000, 256, 1)
BEAMS = (OutputBeam((5, 6, 7), float_bits(-1.5), float_bits(-0.5)), OutputBeam((5, 6, 8), float_bits(-2.5), "00000000"))
LOADS = Loads(seed=0, clients=4, vocabulary=100, max_tokens=None)


class Simulated:
    """A side that answers ``rate`` requests a second, times ``1 + wobble`` and ``1 - wobble`` in turn, in waves of
    four; ``status`` and ``beams`` are every answer's. The first load is the warm-up."""

    def __init__(
        self, rate: float, *, wobble: float = 0.0, status: int = 200, beams: tuple[OutputBeam, ...] = BEAMS
    ) -> None:
        self._rate, self._wobble, self._status, self._beams = rate, wobble, status, beams
        self.loads: list[list[Share]] = []
        self._sent = 0

    def load(self, load: list[Share]) -> Fired:
        self.loads.append(load)
        count = sum(share.count for share in load)
        self._sent += count
        rate = self._rate * (1 + self._wobble * (-1) ** len(self.loads))
        shots = [Shot(self._status, 0.01, index / rate) for index in range(count)]
        kept = {(number, index): self._beams for number in range(len(load)) for index in compared(load, number)}
        return Fired(shots, kept if self._status == 200 else {})

    def counters(self) -> Counters:
        return Counters(self._sent // 4, 0, {"engine": self._sent * 0.002})


def simulated(http: Simulated, inside: Simulated, *, point: Point = AT_8, rounds: int = 4) -> Measured:
    return measure(point, http, inside, LOADS, pace=100.0, seconds=1.0, rounds=rounds)


def half(rate: float = 100.0, latencies_ms: list[float] | None = None, **changes: Any) -> Half:
    times = latencies_ms or [10.0]
    return Half(rate, times, Counter({200: len(times)}), **changes)


def alone(times: list[float]) -> Measured:
    return Measured(ALONE, 100.0, [half(latencies_ms=times)], [half(latencies_ms=[9.0] * len(times))])
