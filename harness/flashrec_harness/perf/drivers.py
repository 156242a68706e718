"""Who sends a sweep's requests: threads to the engine in this process, or client processes to a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from flashrec_harness.load import Answer, LoadResult, closed_loop, open_loop
from flashrec_harness.material import Prompt
from flashrec_harness.overload.fleet import Fleet, Load
from flashrec_harness.perf.subjects import HttpSubject, Subject
from flashrec_harness.perf.workload import Cell, Sweep


class Driver(Protocol):
    """Sends a sweep's prompts in turn."""

    def closed(self, requests: int, concurrency: int) -> LoadResult:
        """As many clients, each with its next request when the last one is answered."""

    def open(self, requests: int, rate: float, seed: int) -> LoadResult:
        """Poisson arrivals at ``rate`` per second."""

    def flush(self) -> None:
        """Empty the prefix cache."""

    def close(self) -> None:
        """End what was started."""


class Threads:
    """Threads of this process, over any subject."""

    def __init__(self, subject: Subject, sweep: Sweep, prompts: Sequence[Prompt]) -> None:
        subject.prepare(Cell(n=sweep.n, concurrency=sweep.concurrency, drive="closed"), prompts)
        self._subject = subject

    def closed(self, requests: int, concurrency: int) -> LoadResult:
        return closed_loop(self._subject.send, requests, concurrency)

    def open(self, requests: int, rate: float, seed: int) -> LoadResult:
        return open_loop(self._subject.send, requests, rate, seed=seed)

    def flush(self) -> None:
        self._subject.flush()

    def close(self) -> None: ...


class Processes:
    """``sweep.clients`` processes: one alone answers for some hundreds of requests a second and no more."""

    def __init__(self, subject: HttpSubject, sweep: Sweep, prompts: Sequence[Prompt]) -> None:
        bodies = subject.bodies(prompts, sweep.n)
        self._subject, self._clients = subject, sweep.clients
        self._fleet = Fleet(subject.url, bodies, sweep.clients, subject.path)

    def closed(self, requests: int, concurrency: int) -> LoadResult:
        requests = self._for_all(requests)
        return result_of(self._fleet.load(requests, concurrency), requests)

    def open(self, requests: int, rate: float, seed: int) -> LoadResult:
        requests = self._for_all(requests)
        return result_of(self._fleet.load(requests, 1, rate, seed), requests)

    def _for_all(self, requests: int) -> int:
        """So many or a few more, of which each process sends as many as the others."""
        return -(-requests // self._clients) * self._clients

    def flush(self) -> None:
        self._subject.flush()

    def close(self) -> None:
        self._fleet.close()


def result_of(load: Load, requests: int) -> LoadResult:
    """The shots of several processes as one loop's answers, in the order in which they were due.

    A refusal is a failure, and so is each of ``requests`` that got no answer. Raises :class:`RuntimeError` without any.
    """
    if not load.shots:
        raise RuntimeError(f"none of {requests} requests was answered: is the server gone?")
    shots = sorted(load.shots, key=lambda shot: shot.end - shot.seconds - shot.late)
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
    answers += [Answer(index, end, end, "no answer") for index in range(len(shots), requests)]
    return LoadResult(tuple(answers), end)
