"""Client processes that load a server, and what came back."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from flashrec_harness.http_client import Client
from flashrec_harness.load import closed_loop, open_loop

THREADS = 256
"""Requests that one client process can have under way."""


@dataclass(frozen=True, slots=True)
class Shot:
    """One request: its status, how long its answer took, when that came (seconds since the epoch), and how long the
    request had been due when it was sent."""

    status: int
    seconds: float
    end: float
    late: float = 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """All shots of a load, in no order, and the cores that its clients kept busy: CPU seconds per second."""

    shots: Sequence[Shot]
    cores: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What a client process sends to ``path``: ``requests`` of ``payloads`` in turn, from ``first`` on, at ``rate`` per
    second or, without one, from ``concurrency`` clients in a closed loop."""

    url: str
    path: str
    payloads: Sequence[bytes]
    first: int
    requests: int
    concurrency: int
    rate: float | None
    seed: int


def fire(plan: Plan) -> tuple[list[Shot], float]:
    """Carry a plan out; its shots, and the CPU seconds that this process spent on them."""
    shots: dict[int, Shot] = {}
    spent = time.process_time()
    with Client(plan.url) as client:

        def send(index: int) -> None:
            start = time.time()
            status = client.post(plan.path, plan.payloads[(plan.first + index) % len(plan.payloads)]).status
            end = time.time()
            shots[index] = Shot(status, end - start, end)

        if plan.rate is None:
            closed_loop(send, plan.requests, plan.concurrency)
        else:
            answers = open_loop(send, plan.requests, plan.rate, seed=plan.seed, max_in_flight=THREADS).answers
            for answer in answers:
                if not answer.error:
                    shot = shots[answer.index]
                    shots[answer.index] = replace(shot, late=max(0.0, answer.latency_s - shot.seconds))
    return list(shots.values()), time.process_time() - spent


class Fleet:
    """Client processes that share a load evenly, each with payloads of its own where there are enough; one of them is
    this process. A load goes on where the one before ended: a payload comes again when all have been sent."""

    def __init__(self, url: str, payloads: Sequence[bytes], clients: int, path: str = "/generate") -> None:
        self._url, self._path, self._clients = url, path, clients
        self._payloads = [payloads[number::clients] or payloads for number in range(clients)]
        self._sent = 0
        self._pool = None
        if clients > 1:
            self._pool = ProcessPoolExecutor(clients, mp_context=multiprocessing.get_context("spawn"))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def load(self, requests: int, concurrency: int, rate: float | None = None, seed: int = 0) -> Load:
        """Send ``requests`` and wait for every answer."""
        plans = self.plans(requests, concurrency, rate, seed)
        start = time.perf_counter()
        found = list(map(fire, plans) if self._pool is None else self._pool.map(fire, plans))
        seconds = time.perf_counter() - start
        return Load([shot for shots, _ in found for shot in shots], sum(spent for _, spent in found) / seconds)

    def plans(self, requests: int, concurrency: int, rate: float | None = None, seed: int = 0) -> list[Plan]:
        """The next load, a plan for each client process."""
        share = self._clients
        each = max(1, requests // share)
        first, self._sent = self._sent, self._sent + each
        return [
            Plan(
                self._url,
                self._path,
                payloads,
                first,
                each,
                max(1, concurrency // share),
                None if rate is None else rate / share,
                seed * share + number,
            )
            for number, payloads in enumerate(self._payloads)
        ]


def steady_rate(shots: Sequence[Shot]) -> float:
    """Answers (200) per second over the middle three fifths of them: without filling up and running dry.

    The slope of the least-squares line through their times, since answers come a wave at a time: between the first and
    the last of them it would matter in which part of a wave the two fall, a tenth where there are ten waves.
    """
    ends = np.sort(np.array([shot.end for shot in shots if shot.status == 200], dtype=np.float64))
    steady = ends[len(ends) // 5 : len(ends) - len(ends) // 5]
    number = np.arange(len(steady)) - (len(steady) - 1) / 2
    spread = float(number @ (steady - steady.mean())) if len(steady) > 1 else 0.0
    return float(number @ number) / spread if spread > 0 else 0.0
