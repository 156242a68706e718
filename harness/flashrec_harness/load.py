"""Load generation: a closed loop at a fixed concurrency, and an open loop with Poisson arrivals."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

Send = Callable[[int], object]
"""Sends request ``i`` and blocks until it is answered; raises if it failed. Called from many threads."""

Clock = Callable[[], float]
"""Seconds, monotonic."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's times in seconds since the loop began; ``error`` is empty if it was answered."""

    index: int
    due: float
    end: float
    error: str = ""

    @property
    def latency_s(self) -> float:
        """From when the request was due, so that a backlog of the load generator counts as waiting."""
        return self.end - self.due


@dataclass(frozen=True, slots=True)
class LoadResult:
    """All answers of one loop, in request order; ``wall_s`` from the first request to the last answer."""

    answers: tuple[Answer, ...]
    wall_s: float

    @property
    def failures(self) -> tuple[Answer, ...]:
        """Requests that were not answered."""
        return tuple(answer for answer in self.answers if answer.error)

    @property
    def latencies_ms(self) -> list[float]:
        """Latencies of the answered requests, in milliseconds."""
        return [answer.latency_s * 1e3 for answer in self.answers if not answer.error]

    @property
    def throughput(self) -> float:
        """Answered requests per second."""
        return (len(self.answers) - len(self.failures)) / self.wall_s

    def goodput(self, target_ms: float) -> float:
        """Requests per second that were answered within ``target_ms``."""
        return sum(latency <= target_ms for latency in self.latencies_ms) / self.wall_s


def percentile(values: Sequence[float], q: float) -> float:
    """The ``q``-th percentile by linear interpolation (Hyndman and Fan's type 7)."""
    return float(np.percentile(np.asarray(values, dtype=np.float64), q))


def _answer(send: Send, index: int, due: float, start: float, clock: Clock) -> Answer:
    try:
        send(index)
    except Exception as error:
        return Answer(index, due, clock() - start, f"{type(error).__name__}: {error}")
    return Answer(index, due, clock() - start)


def closed_loop(send: Send, requests: int, concurrency: int, *, clock: Clock = time.perf_counter) -> LoadResult:
    """``concurrency`` clients, each sending its next request when the last one is answered."""
    lock, upcoming = threading.Lock(), iter(range(requests))
    answers: list[Answer] = []
    start = clock()

    def client() -> None:
        while True:
            with lock:
                index = next(upcoming, None)
            if index is None:
                return
            answer = _answer(send, index, clock() - start, start, clock)
            with lock:
                answers.append(answer)

    threads = [threading.Thread(target=client) for _ in range(min(concurrency, requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return LoadResult(tuple(sorted(answers, key=lambda a: a.index)), max(a.end for a in answers))


def poisson_arrivals(requests: int, rate: float, seed: int) -> list[float]:
    """Seconds at which ``requests`` requests are due: exponential gaps of mean ``1 / rate``, seeded."""
    gaps = np.random.default_rng(seed).exponential(1.0 / rate, requests)
    return [float(due) for due in np.cumsum(gaps)]


def open_loop(
    send: Send,
    requests: int,
    rate: float,
    *,
    seed: int = 0,
    max_in_flight: int = 512,
    clock: Clock = time.perf_counter,
) -> LoadResult:
    """Requests arrive at ``rate`` per second whether or not earlier ones are answered; see :func:`arrivals`."""
    dues = poisson_arrivals(requests, rate, seed)
    return arrivals(send, dues, max_in_flight=max_in_flight, clock=clock)


def arrivals(
    send: Send, dues: Sequence[float], *, max_in_flight: int = 512, clock: Clock = time.perf_counter
) -> LoadResult:
    """Request ``i`` is sent ``dues[i]`` seconds from now, whether or not earlier ones are answered.

    Latency counts from the arrival, not from when a thread was free to send: a server that stalls is charged
    for everything that should have arrived meanwhile (no coordinated omission).
    """
    start = clock()
    with ThreadPoolExecutor(min(max_in_flight, len(dues))) as pool:
        pending = []
        for index, due in enumerate(dues):
            time.sleep(max(0.0, due - (clock() - start)))
            pending.append(pool.submit(_answer, send, index, due, start, clock))
        answers = tuple(future.result() for future in pending)
    return LoadResult(answers, max(answer.end for answer in answers))


def batches(
    generate: Callable[[Sequence[int]], object],
    requests: int,
    size: int,
    *,
    clock: Clock = time.perf_counter,
) -> LoadResult:
    """``size`` requests at once, in lockstep: the next batch starts when the last one is answered.

    ``generate`` takes request numbers. A request's latency is its batch's; a batch that raises fails whole.
    """
    answers: list[Answer] = []
    start = clock()
    for first in range(0, requests, size):
        numbers = range(first, min(first + size, requests))
        due = clock() - start
        batch = _answer(lambda _, chosen=numbers: generate(chosen), first, due, start, clock)  # type: ignore[misc]
        answers += [Answer(index, due, batch.end, batch.error) for index in numbers]
    return LoadResult(tuple(answers), answers[-1].end)
