"""Counts that all processes of a server can read at any time: what waits, what runs, and who holds how much."""

from __future__ import annotations

from collections.abc import MutableSequence
from multiprocessing.context import SpawnContext
from typing import cast


class Board:
    """64-bit counts in shared memory; each has one writer.

    The engine's process writes :attr:`queue_depth`, :attr:`rows_in_flight` and :attr:`recording`; front ``i`` writes
    ``held[i]``, the requests that it holds.
    """

    def __init__(self, context: SpawnContext, fronts: int) -> None:
        self._engine = cast("MutableSequence[int]", context.RawArray("q", 3))
        self.held = cast("MutableSequence[int]", context.RawArray("q", fronts))

    @property
    def queue_depth(self) -> int:
        """Requests that wait for a wave."""
        return self._engine[0]

    @property
    def rows_in_flight(self) -> int:
        """Beams of the waves that were admitted and have not ended."""
        return self._engine[1]

    @property
    def recording(self) -> bool:
        """Whether a trace is being recorded, which wants the fronts' spans."""
        return bool(self._engine[2])

    def post(self, queue_depth: int, rows_in_flight: int, *, recording: bool) -> None:
        """Tell the fronts how things stand."""
        self._engine[0], self._engine[1], self._engine[2] = queue_depth, rows_in_flight, recording
