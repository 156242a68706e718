"""The operating points of the comparison, and the prompts that both sides are sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from flashrec.errors import ConfigError
from flashrec_harness.perf.workload import Workload

JUDGED_FROM = 8
"""Concurrency from which on throughput is judged."""
TAIL_REQUESTS = 200
"""Answers behind a p99: below, it is the slowest one or two."""
WAKING = 5
"""Answers at the beginning of a round that the report lists by themselves, with the tail's ratio without them."""
_KEPT = 4
"""Answers of a round that are compared between the sides, at least."""

Seed = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """Prompts of ``context`` tokens, ``n`` beams, ``concurrency`` requests at once."""

    context: int
    n: int
    concurrency: int

    @property
    def row(self) -> str:
        """Without the concurrency."""
        return f"{self.context} x {self.n}"

    @property
    def name(self) -> str:
        return f"{self.row} at {self.concurrency}"


WAKE = Point(64, 8, 64)
"""What a server answers before anything is measured. So many connections reach each of eight processes in front of it,
but for about 2 in 1,000 times, and the first request that a process answers takes it some milliseconds more."""

SMALL = (Point(200, 32, 1), Point(200, 32, 8))
"""For a CPU and for the short form: what the bundled checkpoint answers some dozens of times a second."""


def points(workload: Workload) -> tuple[Point, ...]:
    """The workload's distinct points, each width and context at concurrency 1 as well, in the file's order.

    Raises :class:`ConfigError` for a cell whose prompts come from histories: there are not enough for all requests.
    """
    found: dict[Point, None] = {}
    for cell in workload.cells:
        if cell.context is None:
            raise ConfigError(
                f"workload {workload.name}: {cell.name}: give it a context, so that no prompt comes twice"
            )
        for concurrency in (1, cell.concurrency):
            found[Point(cell.context, cell.n, concurrency)] = None
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Share:
    """What one client sends: ``count`` prompts drawn with ``seed`` from ``vocabulary`` token ids, each once, from
    ``concurrency`` threads in a closed loop. ``max_tokens`` is ``None`` with a catalog."""

    point: Point
    seed: Seed
    count: int
    concurrency: int
    vocabulary: int
    max_tokens: int | None

    def prompts(self) -> list[list[int]]:
        """Its prompts' token ids; no prefix is shared."""
        shape = (self.count, self.point.context)
        drawn: list[list[int]] = np.random.default_rng(self.seed).integers(0, self.vocabulary, shape).tolist()
        return drawn

    def parameters(self) -> dict[str, int]:
        """``sampling_params`` of the request."""
        limit = {} if self.max_tokens is None else {"max_new_tokens": self.max_tokens}
        return {"n": self.point.n, "beam_width": self.point.n, "temperature": 0, **limit}


def shares(
    point: Point, seed: Seed, requests: int, clients: int, *, vocabulary: int, max_tokens: int | None = None
) -> list[Share]:
    """A round's load, divided evenly among at most ``clients`` clients, none without a request at a time."""
    among = min(clients, point.concurrency)
    return [
        Share(point, (*seed, number), count, at_once, vocabulary, max_tokens)
        for number, (count, at_once) in enumerate(
            zip(_even(max(requests, among), among), _even(point.concurrency, among), strict=True)
        )
    ]


def _even(total: int, parts: int) -> Iterator[int]:
    return (total // parts + (number < total % parts) for number in range(parts))


def compared(load: list[Share], number: int) -> frozenset[int]:
    """Which answers of share ``number`` are kept: evenly over its requests, :data:`_KEPT` or more in all shares."""
    keep = min(-(-_KEPT // len(load)), load[number].count)
    return frozenset(load[number].count * index // keep for index in range(keep))
