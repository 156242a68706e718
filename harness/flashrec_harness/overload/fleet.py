"""Client processes that load a server, and what came back."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import multiprocessing.connection
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np

from flashrec_harness.http_client import Client, may_poll
from flashrec_harness.load import Answer, LoadResult, arrivals, closed_loop, poisson_arrivals

THREADS = 256
"""Requests that one client process can have under way."""
_LEAD_S = 0.1
"""From handing out a load to its beginning, the same for all processes."""


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
    """All shots of a load, in no order, the cores that its clients kept busy (CPU seconds per second), by payload the
    last answer (200) to it, where they were to be kept, and what became of the requests that got no answer."""

    shots: Sequence[Shot]
    cores: float
    contents: Mapping[int, bytes] = field(default_factory=dict)
    lost: Sequence[str] = ()

    def result(self, requests: int) -> LoadResult:
        """The shots of several processes as one loop's answers, in the order in which they were due.

        A refusal is a failure, and so is each of ``requests`` that got no answer. Raises :class:`RuntimeError` without
        any.
        """
        if not self.shots:
            why = self.lost[0] if self.lost else "is the server gone?"
            raise RuntimeError(f"none of {requests} requests was answered: {why}")
        shots = sorted(self.shots, key=lambda shot: shot.end - shot.seconds - shot.late)
        begin = shots[0].end - shots[0].seconds - shots[0].late
        end = max(shot.end for shot in shots) - begin
        answers = [
            Answer(
                index,
                shot.end - shot.seconds - shot.late - begin,
                shot.end - begin,
                "" if shot.status == 200 else f"HTTP {shot.status}",
            )
            for index, shot in enumerate(shots)
        ]
        for index in range(len(shots), requests):
            number = index - len(shots)
            answers.append(Answer(index, end, end, self.lost[number] if number < len(self.lost) else "no answer"))
        return LoadResult(tuple(answers), end)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a client process sends to ``path`` from ``begin`` on (seconds since the epoch): ``requests`` of ``payloads``
    in turn, number ``first`` first, each when it is due or, without ``dues``, from ``concurrency`` clients in a closed
    loop. ``keep``: answers are wanted; ``awake``: each is waited for without sleeping."""

    url: str
    path: str
    payloads: Sequence[bytes]
    first: int
    requests: int
    concurrency: int
    dues: Sequence[float] | None
    begin: float = 0.0
    keep: bool = False
    awake: bool = False


@dataclass(frozen=True, slots=True)
class Fired:
    """What one process makes of a plan: its shots, the CPU seconds that it spent on them, the answers by place among
    its payloads, and the errors of what got none."""

    shots: list[Shot] = field(default_factory=list)
    spent: float = 0.0
    contents: dict[int, bytes] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)


def fire(plan: Plan, client: Client) -> Fired:
    """Carry a plan out."""
    if not plan.requests:
        return Fired()
    shots: dict[int, Shot] = {}
    contents: dict[int, bytes] = {}
    time.sleep(max(0.0, plan.begin - time.time()))
    spent = time.process_time()

    def send(index: int) -> None:
        payload = (plan.first + index) % len(plan.payloads)
        start = time.time()
        reply = client.post(plan.path, plan.payloads[payload], awake=plan.awake)
        end = time.time()
        shots[index] = Shot(reply.status, end - start, end)
        if plan.keep and reply.status == 200:
            contents[payload] = reply.content

    if plan.dues is None:
        found = closed_loop(send, plan.requests, plan.concurrency)
    else:
        found = arrivals(send, plan.dues, max_in_flight=THREADS)
        for answer in found.answers:
            if not answer.error:
                shot = shots[answer.index]
                shots[answer.index] = replace(shot, late=max(0.0, answer.latency_s - shot.seconds))
    lost = [answer.error for answer in found.failures]
    return Fired(list(shots.values()), time.process_time() - spent, contents, lost)


@functools.cache
def _client(url: str) -> Client:
    """A client process's own: its connections last as long as it does, so that only a first load opens any."""
    return Client(url)


def _fire(plan: Plan) -> Fired:
    return fire(plan, _client(plan.url))


def _end_with_parent() -> None:
    """Whoever started this process may be killed, and would leave it behind."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _ready() -> None:
    """Runs in a client process that has done its imports."""


class Fleet:
    """Client processes that share a load evenly, each with payloads of its own where there are enough; one alone is
    this process. A load goes on where the one before ended: a payload comes again when all have been sent. Connections
    stay open from load to load. Raises :class:`ConfigError` for an address that load cannot be sent to."""

    def __init__(self, url: str, payloads: Sequence[bytes], clients: int, path: str = "/generate") -> None:
        self._url, self._path = url, path
        everything = range(len(payloads))
        self._numbers = [everything[number::clients] or everything for number in range(clients)]
        self._payloads = [[payloads[number] for number in numbers] for numbers in self._numbers]
        self._sent = [0] * clients
        self._own = Client(url)
        spawn = multiprocessing.get_context("spawn")
        # A pool each: of one for all, whoever is ready first would carry out several plans, one after the other.
        self._pools = [
            ProcessPoolExecutor(1, mp_context=spawn, initializer=_end_with_parent)
            for _ in range(clients if clients > 1 else 0)
        ]
        for started in [pool.submit(_ready) for pool in self._pools]:
            started.result()

    def close(self) -> None:
        for pool in self._pools:
            pool.shutdown()
        self._own.close()

    def rewind(self) -> None:
        """Let the next load begin with the first payloads again."""
        self._sent = [0] * len(self._sent)

    def load(
        self, requests: int, concurrency: int, rate: float | None = None, seed: int = 0, *, keep: bool = False
    ) -> Load:
        """Send ``requests`` and wait for every answer; ``keep`` the answers."""
        begin = time.time() + (_LEAD_S if self._pools else 0.0)
        awake = rate is None and concurrency == len(self._payloads) == 1 and may_poll()
        plans = [
            replace(plan, begin=begin, keep=keep, awake=awake) for plan in self.plans(requests, concurrency, rate, seed)
        ]
        if self._pools:
            running = [pool.submit(_fire, plan) for pool, plan in zip(self._pools, plans, strict=True)]
            found = [one.result() for one in running]
        else:
            found = [fire(plan, self._own) for plan in plans]
        seconds = time.time() - begin
        contents = {
            numbers[payload]: content
            for numbers, one in zip(self._numbers, found, strict=True)
            for payload, content in one.contents.items()
        }
        return Load(
            [shot for one in found for shot in one.shots],
            sum(one.spent for one in found) / seconds,
            contents,
            [error for one in found for error in one.lost],
        )

    def plans(self, requests: int, concurrency: int, rate: float | None = None, seed: int = 0) -> list[Plan]:
        """The next load, a plan for each client process: clients as evenly as they go and requests in proportion, or of
        one Poisson stream each its turn."""
        share = len(self._payloads)
        at_once = [max(1, count) for count in _shares(concurrency, [1] * share)]
        dues = None if rate is None else poisson_arrivals(requests, rate, seed)
        # Who has more clients answers for more: else some would run dry while others are not half through.
        counts = _shares(requests, at_once) if dues is None else [len(dues[number::share]) for number in range(share)]
        plans = []
        for number, payloads in enumerate(self._payloads):
            first, self._sent[number] = self._sent[number], self._sent[number] + counts[number]
            turns = None if dues is None else dues[number::share]
            plans.append(Plan(self._url, self._path, payloads, first, counts[number], at_once[number], turns))
        return plans


def _shares(total: int, weights: Sequence[int]) -> list[int]:
    """``total`` in whole parts, as near to the weights as they go."""
    ends = [total * passed // sum(weights) for passed in itertools.accumulate(weights)]
    return [end - begin for begin, end in itertools.pairwise([0, *ends])]


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
