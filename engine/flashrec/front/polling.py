"""A front that stays awake while a lone request is out, so that its answer finds a warm processor."""

from __future__ import annotations

import asyncio
import time

from flashrec.server.lifecycle import Places

_LONE = 1
"""Requests that the whole server may hold: with more of them throughput counts, and processors are for the work."""
_AWAKE_S = 0.1
"""How long a front stays awake for one request; a longer search loses nothing by a sleep."""
_LINGER_S = 0.001
"""How long it stays awake after an answer: whoever asks again on it does so within that time."""


class BusyPolling:
    """Keeps an event loop from sleeping: it looks for events again and again, which takes one processor meanwhile.

    A process that slept does everything slowly for a while, waking up included. It sleeps all the same while a thread
    of its own works for a request, which would have to ask it for the interpreter's lock, and is not woken when
    another process's request ends. ``places`` are the server's; all methods run on the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, places: Places) -> None:
        self._loop = loop
        self._places = places
        self._held = places.held
        self._until = 0.0
        self._polling = False
        places.on_change = self._changed

    def _changed(self) -> None:
        """A request has come to this process, gone from it, or come back to its loop."""
        if self._places.held != self._held:
            self._held = self._places.held
            self._until = time.monotonic() + (_AWAKE_S if self._held else _LINGER_S)
        if not self._polling:
            self._polling = True
            self._poll()

    def _poll(self) -> None:
        places = self._places
        self._polling = places.taken <= _LONE and not places.threads and time.monotonic() < self._until
        if self._polling:
            self._loop.call_soon(self._poll)
