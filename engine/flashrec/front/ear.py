"""Hearing the fronts: on a thread of its own, or on the engine's while that has nothing else to do."""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flashrec.front.link import Link, LinkClosed

logger = logging.getLogger(__name__)

_AWAKE_S = 0.01
"""How long the engine's thread listens after the answer to a lone request. From that to the next request of a client
that waits for it took 1.9 ms with 50 beams, 5 with 512 (H200, 2026-12-02)."""
_GLANCE_S = 0.001
_LATEST_S = 0.1
"""How long nobody may hear anything while the engine's thread does something else without having said so."""


@dataclass(frozen=True, slots=True)
class _Voice:
    """One front: what to do with each of its messages, and when it has gone."""

    link: Link
    heard: Callable[[Any], None]
    gone: Callable[[], None]


class Ear:
    """Hears what all fronts say, on one thread at a time.

    That is the ear's own, which sleeps until somebody speaks. A thread that slept is late now and then: those that
    passed a lone request on took 0.1 to 0.2 ms to wake, and 1 to 2.3 at their 99th percentile (H200, 2026-12-02). So
    the engine's thread may listen itself for a while instead of sleeping: see :meth:`listen`.
    """

    def __init__(self) -> None:
        self._voices = selectors.DefaultSelector()
        self._waking, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._voices.register(self._waking, selectors.EVENT_READ)
        self._listening = threading.Lock()
        self._own = threading.Event()
        self._own.set()
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="flashrec-hear", daemon=True)
        self._thread.start()

    def add(self, link: Link, heard: Callable[[Any], None], gone: Callable[[], None]) -> None:
        """Hear one more front; from any thread. ``gone`` is called once, when it has hung up or cannot be served; like
        ``heard`` it must not take long."""
        self._voices.register(link, selectors.EVENT_READ, _Voice(link, heard, gone))

    def listen(self, until: Callable[[], bool]) -> None:
        """Hear on the calling thread, awake, until ``until()`` or for a while.

        If it was ``until()``, the ear's own thread sleeps on until :meth:`leave`: waking it can wait.
        """
        self._own.clear()
        self._poke()
        end = time.monotonic() + _AWAKE_S
        while not self._listening.acquire(timeout=_GLANCE_S):
            if until() or time.monotonic() > end:
                self._own.set()
                return
        try:
            end = time.monotonic() + _AWAKE_S
            while not (self._closed or until()):
                if time.monotonic() > end:
                    self._own.set()
                    return
                self._hear(0.0)
        finally:
            self._listening.release()

    def leave(self) -> None:
        """Let the ear's own thread hear again, if the calling one has :meth:`listen`-ed since."""
        if not self._own.is_set():
            self._own.set()

    def close(self) -> None:
        """Hear nobody any more; from any thread but the ear's own, any number of times."""
        if self._closed:
            return
        self._closed = True
        self._own.set()
        self._poke()
        self._thread.join()
        with self._listening:
            self._voices.close()
            self._waking.close()
            self._wake.close()

    def _poke(self) -> None:
        with contextlib.suppress(OSError):  # closed: there is nobody to wake; full: somebody is being woken
            self._wake.send(b"!")

    def _loop(self) -> None:
        while not self._closed:
            self._own.wait(_LATEST_S)
            with self._listening:
                # Asked here: whoever listened meanwhile has read what was to wake this thread.
                if not self._closed:
                    self._hear(None)

    def _hear(self, timeout: float | None) -> None:
        for key, _ in self._voices.select(timeout):
            if key.data is None:
                self._waking.recv(64)
            else:
                self._receive(key.data)

    def _receive(self, voice: _Voice) -> None:
        try:
            for message in voice.link.arrived():
                voice.heard(message)
        except Exception as error:
            if not isinstance(error, LinkClosed):
                logger.exception("a front process can no longer be served")
            self._voices.unregister(voice.link)
            try:
                voice.gone()
            except Exception:  # this thread hears the others
                logger.exception("a front process was not given up in order")
