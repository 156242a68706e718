"""A client that costs little beside the server: as many keep-alive connections as requests at once, and ways to behave
badly.

What the client spends would be charged to the server. CPU time a request of 50 beams, the standard library's client /
this one: 0.34 / 0.14 to 0.21 ms (the host of an H200, 2026-12-01).
"""

from __future__ import annotations

import functools
import os
import re
import select
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

import orjson

from flashrec.errors import ConfigError

TIMEOUT_S = 120.0
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})\b")
_READ_BYTES = 1 << 18
_CORES_TO_POLL = 8
_IDLE_S = 20.0
"""A connection that has rested for so long is not used again: the server may be closing it just now."""


def may_poll() -> bool:
    """Whether a client of this process's cores may stay awake: of few it would keep one from the server."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores >= _CORES_TO_POLL


class HangError(RuntimeError):
    """No answer within :data:`TIMEOUT_S`."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A status and a body, both as they came."""

    status: int
    content: bytes


class Client:
    """Talks to one server, from any thread; a connection that is free serves the next request, the last one first. A
    context manager: its end closes them.

    Raises :class:`ConfigError` for an address that load cannot be sent to.
    """

    def __init__(self, url: str) -> None:
        where = urlsplit(url)
        if where.scheme != "http" or where.hostname is None or where.path not in ("", "/"):
            raise ConfigError(f"--url {url}: load is sent to http://HOST:PORT only, without TLS or a path")
        self._host, self._port = where.hostname, where.port or 80
        self._free: list[tuple[socket.socket, float]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close what no request has in hand."""
        while self._free:
            self._free.pop()[0].close()

    def post(self, path: str, payload: bytes, *, awake: bool = False) -> Reply:
        """Raises :class:`HangError`, and :class:`OSError` where the server is gone.

        ``awake``: look for the answer again and again, which takes a core. Who sleeps until it comes is woken late now
        and then, and counts that as the server's: 1 to 2 ms of a p99 (a guest of an H200's host, 2026-12-02).
        """
        return self._send("POST", path, payload, awake=awake)

    def get(self, path: str) -> Reply:
        """As :meth:`post`."""
        return self._send("GET", path, None)

    def leave(self, path: str, payload: bytes, after_s: float, *, sent: float, reset: bool) -> None:
        """Send a share ``sent`` of a request on a new connection, wait, and go without reading the answer."""
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(payload)}\r\n\r\n"
        ).encode()
        whole = head + payload
        with socket.create_connection((self._host, self._port), timeout=TIMEOUT_S) as connection:
            connection.sendall(whole[: max(1, round(len(whole) * sent))])
            time.sleep(after_s)
            if reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _send(self, method: str, path: str, payload: bytes | None, *, awake: bool = False) -> Reply:
        head = f"{method} {path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
        if payload is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n"
        connection: socket.socket | None = None
        try:
            connection = self._connection()
            connection.sendall(head.encode() + b"\r\n" + (payload or b""))
            status, headers, content = _answer(functools.partial(_more_awake if awake else _more, connection))
        except BaseException as error:
            if connection is not None:
                connection.close()
            if isinstance(error, TimeoutError):
                raise HangError(f"{method} {path}: no answer in {TIMEOUT_S:g} s") from None
            raise
        if headers.get(b"connection", b"").lower() == b"close":
            connection.close()
        else:
            self._free.append((connection, time.monotonic()))
        return Reply(status, content)

    def _connection(self) -> socket.socket:
        """A free connection that the server has not closed, nor is about to, or a fresh one."""
        while self._free:
            try:
                connection, used = self._free.pop()
            except IndexError:  # another thread took it
                break
            if time.monotonic() - used < _IDLE_S and not _readable(connection):
                return connection
            connection.close()
        connection = socket.create_connection((self._host, self._port), timeout=TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection


def _readable(connection: socket.socket) -> bool:
    """Whether something has come; on a connection that rests that can only be its end."""
    return bool(_poll(connection).poll(0))


def _poll(connection: socket.socket) -> select.poll:
    waiting = select.poll()
    waiting.register(connection, select.POLLIN)
    return waiting


def _answer(more: Callable[[], bytes]) -> tuple[int, dict[bytes, bytes], bytes]:
    """Status, headers and body of the next answer; ``more`` reads on.

    Raises :class:`ConnectionError` for half an answer, or one whose length is not said beforehand.
    """
    status, lines, content = _head(more, b"")
    while status < 200:  # the answer itself follows
        status, lines, content = _head(more, content)
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    length = headers.get(b"content-length", b"0" if status == 204 else b"")
    if not length.isdigit():
        raise ConnectionError("the answer has no Content-Length; this client reads no other")
    parts, missing = [content], int(length) - len(content)
    while missing > 0:
        parts.append(more())
        missing -= len(parts[-1])
    return status, headers, b"".join(parts)


def _head(more: Callable[[], bytes], data: bytes) -> tuple[int, list[bytes], bytes]:
    """Status, header lines, and what has come of the body behind them; ``data`` has been read already."""
    while b"\r\n\r\n" not in data:
        data += more()
    head, _, content = data.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    status = _STATUS.match(first)
    if status is None:
        raise ConnectionError(f"no HTTP/1.1 answer: {first[:60]!r}")
    return int(status[1]), lines, content


def _more(connection: socket.socket) -> bytes:
    data = connection.recv(_READ_BYTES)
    if not data:
        raise ConnectionResetError("the server closed the connection before its answer was whole")
    return data


def _more_awake(connection: socket.socket) -> bytes:
    waiting, until = _poll(connection), time.monotonic() + TIMEOUT_S
    while not waiting.poll(0):
        if time.monotonic() > until:
            raise TimeoutError
    return _more(connection)


def json_of(reply: Reply) -> dict[str, object]:
    """The body of an answer that must be a 200. Raises :class:`RuntimeError` otherwise."""
    if reply.status != 200:
        raise RuntimeError(f"status {reply.status}: {reply.content[:200].decode(errors='replace')}")
    body: dict[str, object] = orjson.loads(reply.content)
    return body
