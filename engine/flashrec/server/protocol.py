"""uvicorn's HTTP/1.1 connections, stricter: within limits of bytes, of time and of requests that wait.

uvicorn itself limits only the pause between two requests, and its parser nothing: a byte now and then would keep a
connection for ever, a head could have any length, and a client that stops reading would keep its answer in memory.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, Literal

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from flashrec.server.errors import ApiError

MAX_HEAD_BYTES = 1 << 16
"""A request's line and headers, and what may stand behind a chunked body."""
MAX_PIPELINED = 8
"""Requests that may wait on a connection for the answer to the one before; then it is closed after the last of them."""
WHOLE: dict[str, dict[object, object]] = {"flashrec.whole": {}}
"""The ASGI extension of a request of which all is here."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class _StopParsingError(Exception):
    """Ends the parsing of what has been read: see :meth:`_Impatient._parse`."""


def impatient(timeout_s: float) -> type[HttpToolsProtocol]:
    """A connection that is closed when a request's head, the rest of a body that was answered already, or the reading
    of an answer takes longer than ``timeout_s``."""

    class Impatient(_Impatient):
        patience_s = timeout_s

    return Impatient


class _HeadWithBody(asyncio.Transport):
    """The transport as an answer sees it: its head goes out with what follows it, in one packet and one system call.

    For answers whose body is there when they begin, as all are here: one that came later would hold the head back.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self._head: bytes | bytearray | memoryview | None = None
        self._begun = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._begun and data != _CONTINUE:
            self._begun, self._head = True, data
            return
        head, self._head = self._head, None
        if head is None:
            self._transport.write(data)
        else:
            self._transport.writelines((head, data))

    def flush(self) -> None:
        """Send a head that nothing follows."""
        if self._head is not None and not self._transport.is_closing():
            self.write(b"")

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


class _Impatient(HttpToolsProtocol):
    patience_s: ClassVar[float]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._place: Literal["between", "head", "body"] = "between"
        self._active: RequestResponseCycle | None = None
        self._out: _HeadWithBody | None = None
        self._deaf = self._overlong = self._silent = False
        self._named_bytes = self._silent_bytes = 0
        self._plain_head = b""
        self._start("head")

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self._unset_keepalive_if_required()
        self._silent = True
        self._parse(data)
        if self._silent:  # a piece of a head or of what follows a chunked body, or empty lines
            self._silent_bytes += len(data)
        self._wait()

    def on_message_begin(self) -> None:
        self._silent = False
        if len(self.pipeline) >= MAX_PIPELINED:
            raise _StopParsingError
        super().on_message_begin()
        self._place = "head"
        self._named_bytes = self._silent_bytes = 0
        self._stop("head")
        self._start("head")

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        if self._place == "head":  # what follows a chunked body is no header of the request (RFC 9110, 6.5.1)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._silent = False
        self._named_bytes = self._silent_bytes = 0
        self._stop("head")
        if self.parser.get_http_version() not in ("1.0", "1.1"):
            raise _StopParsingError
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._plain_head = self._head_without_upgrade()
        else:
            super().on_headers_complete()
            self._place = "body"
            self.flow.resume_reading()  # or nobody would see that the client leaves; what may wait is bounded

    def on_body(self, body: bytes) -> None:
        self._silent = False
        self._silent_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._silent = False
        self._silent_bytes = 0
        self._place = "between"
        self._stop("rest")
        if not self._plain_head:
            self.scope["extensions"] = WHOLE
            super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._out is not None:
            self._out.flush()
        super().on_response_complete()
        if self.transport.is_closing():
            self._start("read")
        elif self._place == "head" and not self._pending:  # it was not its turn before
            self._stop("head")
            self._start("head")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start("read")

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop("read")

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._start("read")

    def connection_lost(self, exc: Exception | None) -> None:
        for name in list(self._timers):
            self._stop(name)
        self.pipeline.clear()
        if self._active is not None and not self._active.response_complete:  # uvicorn tells the last one alone
            self._active.disconnected = True
            self._active.message_event.set()
        self._unset_keepalive_if_required()  # uvicorn leaves it where the client reset the connection
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        async def unless_refused(*arguments: Any) -> None:
            if not cycle.disconnected:
                await app(*arguments)

        self._active = cycle
        cycle.transport = self._out = _HeadWithBody(self.transport)
        super()._start_asgi_task(cycle, unless_refused)

    def _wait(self) -> None:
        """Decide for how long to wait for what comes next, if anything should."""
        if self._deaf:
            return
        if self._silent_bytes > MAX_HEAD_BYTES:
            self._refuse(_too_long())
        elif self._place == "body" and self.cycle.response_complete:
            self._start("rest")
        elif self._place == "between" and not self._pending:
            if self._silent:
                self._start("head")
            else:  # the end of a body that was answered before it had come
                self._await_next()

    @property
    def _pending(self) -> bool:
        """Whether an answer is due."""
        return bool(self.pipeline) or (self._active is not None and not self._active.response_complete)

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # The parser takes whoever names another protocol to speak it from here on. None is spoken here, and such a
            # request is one like any other (RFC 9110, 7.8), with its body: it is read again, without that header.
            head, self._plain_head = self._plain_head, b""
            if head:
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                self._parse(head + data[upgrade.args[0] :])
            else:
                self._close_after_answers()
        except httptools.HttpParserError:
            self._refuse(_too_long() if self._overlong else _malformed())

    def _head_without_upgrade(self) -> bytes:
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                value = b",".join(one for one in value.split(b",") if one.strip().lower() != b"upgrade")
            if name != b"upgrade" and (name != b"connection" or value.strip()):
                lines.append(b"%s: %s" % (name, value))
        return b"\r\n".join([*lines, b"", b""])

    def _count(self, size: int) -> None:
        self._named_bytes += size
        if self._named_bytes > MAX_HEAD_BYTES:
            self._overlong = True
            raise _StopParsingError

    def _refuse(self, error: ApiError) -> None:
        """Answer what cannot be read, unless other answers are due first, and close the connection."""
        reached = self._place == "body"  # whether its head has been taken
        if reached and self.pipeline:
            self.pipeline.popleft()  # the one at fault, whose body will not end
            self._close_after_answers()
            return
        if self._pending and not (reached and not self.cycle.response_started):
            self._close_after_answers()
            return
        self._deaf = True
        if not reached or self._pending:
            self.logger.warning("%s", error.message)
            self.transport.write(_as_bytes(error))
        if reached:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()
        self._start("read")

    def _close_after_answers(self) -> None:
        """Read nothing more; the last answer that is due says so."""
        self._deaf = True
        self._stop("head")
        last = self.pipeline[0][0] if self.pipeline else self._active
        if last is not None:
            last.keep_alive = False

    def _await_next(self) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _start(self, name: str) -> None:
        if name not in self._timers:
            self._timers[name] = self.loop.call_later(self.patience_s, self._expire, name)

    def _stop(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()

    def _expire(self, name: str) -> None:
        del self._timers[name]
        if name == "head" and self._pending and not self.transport.is_closing():  # it is not its turn yet
            self._start(name)
        elif name == "head" and self._place == "between":
            self.timeout_keep_alive_handler()
        else:
            self.transport.abort()


def _too_long() -> ApiError:
    return ApiError(431, "head_too_large", f"headers: longer than {MAX_HEAD_BYTES} bytes with the request's line")


def _malformed() -> ApiError:
    return ApiError(400, "malformed_http", "this is not HTTP/1.1, or no request of it")


def _as_bytes(error: ApiError) -> bytes:
    response = error.response()
    headers = [*response.raw_headers, (b"connection", b"close")]
    lines = b"".join(b"%s: %s\r\n" % header for header in headers)
    return STATUS_LINE[error.status] + lines + b"\r\n" + bytes(response.body)
