"""How steady the machine itself is: the same small computation, timed again and again beside a load."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Self

_PERIOD_S = 0.02
_STEPS = 10_000


class Gauge:
    """A process of its own that computes for some tenths of a millisecond, fifty times a second. What it takes varies
    with the machine: cores that are slow after a sleep, that others share, or whose host lowers their clock. The load
    itself is among the others, where it leaves no core alone.

    A context manager: its end is the process's.
    """

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_measure, args=(theirs,), name="gauge", daemon=True)
        self._process.start()
        theirs.close()  # or a process that died would leave us waiting

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join()

    def take(self) -> list[float]:
        """Milliseconds of each computation since the last call. Raises :class:`OSError` or :class:`EOFError` if the
        process died."""
        self._pipe.send(None)
        taken: list[float] = self._pipe.recv()
        return taken


def _measure(pipe: Connection) -> None:
    times: list[float] = []
    while True:
        if not pipe.poll(_PERIOD_S):
            start = time.perf_counter()
            _compute()
            times.append(1e3 * (time.perf_counter() - start))
            continue
        try:
            pipe.recv()
            pipe.send(times)
        except (EOFError, OSError):
            return
        times = []


def _compute() -> int:
    total = 0
    for step in range(_STEPS):
        total = (31 * total + step) & 0xFFFF
    return total
