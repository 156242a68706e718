"""A client that costs little beside the server: one keep-alive connection a thread, and ways to behave badly."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
import time
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

import orjson

TIMEOUT_S = 120.0
_IDLE_S = 20.0
"""A connection that has rested for so long is not used again: the server may be closing it just now."""
_JSON = {"Content-Type": "application/json"}


class HangError(RuntimeError):
    """No answer within :data:`TIMEOUT_S`."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A status and a body, both as they came."""

    status: int
    content: bytes


class Client:
    """Talks to one server; each thread has a connection of its own. A context manager: its end closes them all."""

    def __init__(self, url: str) -> None:
        where = urlsplit(url)
        assert where.hostname is not None
        self._host, self._port = where.hostname, where.port or 80
        self._own = threading.local()
        self._all: list[http.client.HTTPConnection] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._all:
            connection.close()

    def post(self, path: str, payload: bytes) -> Reply:
        """Raises :class:`HangError`, and :class:`OSError` where the server is gone."""
        return self._send("POST", path, payload)

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

    def _send(self, method: str, path: str, payload: bytes | None) -> Reply:
        connection = self._connection()
        try:
            connection.request(method, path, payload, _JSON if payload is not None else {})
            answer = connection.getresponse()
            content = answer.read()
        except TimeoutError:
            self._drop()
            raise HangError(f"{method} {path}: no answer in {TIMEOUT_S:g} s") from None
        except (http.client.HTTPException, OSError):
            self._drop()
            raise
        return Reply(answer.status, content)

    def _connection(self) -> http.client.HTTPConnection:
        """This thread's connection, a fresh one where it has none or one that rested."""
        now = time.monotonic()
        if now - getattr(self._own, "used", -_IDLE_S) >= _IDLE_S:
            self._drop()
        self._own.used = now
        if getattr(self._own, "connection", None) is None:
            self._own.connection = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
            self._all.append(self._own.connection)
        connection: http.client.HTTPConnection = self._own.connection
        return connection

    def _drop(self) -> None:
        connection: http.client.HTTPConnection | None = getattr(self._own, "connection", None)
        if connection is not None:
            connection.close()
            self._all.remove(connection)
        self._own.connection = None


def json_of(reply: Reply) -> dict[str, object]:
    """The body of an answer that must be a 200. Raises :class:`RuntimeError` otherwise."""
    if reply.status != 200:
        raise RuntimeError(f"status {reply.status}: {reply.content[:200].decode(errors='replace')}")
    body: dict[str, object] = orjson.loads(reply.content)
    return body
