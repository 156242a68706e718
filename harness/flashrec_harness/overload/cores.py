"""Cores of their own for server and clients, so that a load's cost is not taken for the server's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

ENOUGH = 4
"""Cores from which on they are divided. With fewer the server would have one alone, and its event loop and its engine,
which use two, would take it from each other as no user's do."""


@dataclass(frozen=True, slots=True)
class Cores:
    """``server`` and ``clients`` are disjoint, or equal where there is nothing to divide."""

    server: frozenset[int]
    clients: frozenset[int]

    @property
    def divided(self) -> bool:
        return self.server != self.clients

    def __str__(self) -> str:
        if not self.divided:
            return f"server and clients share {len(self.server)} cores"
        return f"server on {len(self.server)} cores, clients on {len(self.clients)} others"


def divide(available: frozenset[int]) -> Cores:
    """A quarter of the cores for the clients, the others for the server; all for both below :data:`ENOUGH`."""
    if len(available) < ENOUGH:
        return Cores(available, available)
    clients = frozenset(sorted(available)[-(len(available) // 4) :])
    return Cores(available - clients, clients)


@contextmanager
def kept_to(cores: frozenset[int]) -> Iterator[None]:
    """What this thread starts meanwhile, threads and processes, runs on these cores (Linux)."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
