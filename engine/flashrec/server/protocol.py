"""uvicorn's HTTP/1.1 connections, less patient: nobody holds one by sending or reading slowly, or by a long head."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 1 << 16
"""A request's line and headers, where they come in several pieces: the parser itself would take any number."""


def impatient(timeout_s: float) -> type[HttpToolsProtocol]:
    """A connection that is closed when a request's head, the rest of a body that was answered already, or the reading
    of an answer takes longer than ``timeout_s``.

    uvicorn limits the pause between two requests only: a byte now and then would keep a connection for ever, and a
    client that stops reading would keep its answer in memory.
    """

    class Impatient(HttpToolsProtocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._timers: dict[str, asyncio.TimerHandle] = {}
            self._head_bytes = 0
            self._in_request = self._got_on = False
            self._start("head")

        def data_received(self, data: bytes) -> None:
            self._got_on = False
            super().data_received(data)
            if not self._in_request and not self._got_on:  # an empty line before a request
                self._start("head")
            if "head" in self._timers:
                self._head_bytes += len(data)
                if self._head_bytes > MAX_HEAD_BYTES:
                    self.transport.abort()
            elif self._in_request and self.cycle is not None and self.cycle.response_complete:
                self._start("rest")

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._in_request, self._head_bytes = True, 0
            self._start("head")

        def on_headers_complete(self) -> None:
            self._stop("head")
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._in_request, self._got_on = False, True
            self._stop("rest")
            super().on_message_complete()

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
                self._timers[name] = self.loop.call_later(timeout_s, self._expire, name)

        def _stop(self, name: str) -> None:
            timer = self._timers.pop(name, None)
            if timer is not None:
                timer.cancel()

        def _expire(self, name: str) -> None:
            del self._timers[name]
            if name == "head" and self.flow.read_paused:  # it is we who do not read: requests before it are served
                self._start(name)
            else:
                self.transport.abort()

    return Impatient
