"""uvicorn's HTTP/1.1 connections, less patient: nobody holds one open by sending or reading slowly."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


def impatient(timeout_s: float) -> type[H11Protocol]:
    """A connection that is closed when a request's head, or the reading of an answer, stalls for ``timeout_s``.

    uvicorn limits the rest between two requests only: a byte now and then would keep a connection for ever, and a
    client that stops reading would keep its answer in memory.
    """

    class Impatient(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._timers: dict[str, asyncio.TimerHandle] = {}
            self._start("head")

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is h11.IDLE:
                self._start("head")
            else:
                self._stop("head")

        def pause_writing(self) -> None:
            super().pause_writing()
            self._start("read")

        def resume_writing(self) -> None:
            super().resume_writing()
            self._stop("read")

        def connection_lost(self, exc: Exception | None) -> None:
            for name in list(self._timers):
                self._stop(name)
            super().connection_lost(exc)

        def _start(self, name: str) -> None:
            if name not in self._timers:
                self._timers[name] = self.loop.call_later(timeout_s, self.transport.abort)

        def _stop(self, name: str) -> None:
            timer = self._timers.pop(name, None)
            if timer is not None:
                timer.cancel()

    return Impatient
