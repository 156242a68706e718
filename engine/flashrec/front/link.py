"""The pipe between a front and the engine's process: whole messages, in order, from any thread."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import socket
import struct
import threading
from multiprocessing.connection import Connection
from typing import Any

_HEADER = struct.Struct("<Q")
"""Before each parcel: how many bytes of pickle follow."""
_READ_BYTES = 1 << 16
"""A read of 1 KB takes 3.4 us with room for so much and 12 with room for 1 MiB (Intel Xeon, 2026-12-02)."""
_AT_ONCE_BYTES = 1 << 15
"""A pipe of Linux's says that it has room while less than a quarter of its 208 KiB is taken."""


class LinkClosed(Exception):  # noqa: N818 - an end, not an error
    """The other process has gone."""


class Link:
    """One end of the pipe. Messages that are sent together arrive together, as one parcel."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._room = select.poll()
        self._room.register(connection, select.POLLOUT)
        self._received = bytearray()

    def send(self, *messages: object) -> None:
        """Raises :class:`LinkClosed`."""
        parcel = _parcel(messages)
        try:
            with self._sending:
                self._write(parcel)
        except OSError:
            raise LinkClosed from None

    def send_at_once(self, *messages: object) -> bool:
        """Send if that takes no waiting; whether it did, or there is nobody any more to send to."""
        parcel = _parcel(messages)
        if len(parcel) > _AT_ONCE_BYTES or not self._sending.acquire(blocking=False):
            return False
        try:
            if not self._room.poll(0):
                return False
            self._write(parcel)
        except OSError:
            self.close()
        finally:
            self._sending.release()
        return True

    def arrived(self) -> list[Any]:
        """The messages that are here, of a link that is readable; none while the end of the first parcel is missing.

        One thread at a time, as with :meth:`receive`. Raises :class:`LinkClosed`.
        """
        self._read(_READ_BYTES)
        messages: list[Any] = []
        while self._missing() == 0:
            messages += self._unpack()
        return messages

    def receive(self) -> tuple[Any, ...]:
        """Wait for a parcel. Raises :class:`LinkClosed`."""
        while missing := self._missing():
            self._read(missing)
        return self._unpack()

    def fileno(self) -> int:
        """For a selector or an event loop: readable when something has come."""
        return self._connection.fileno()

    def close(self) -> None:
        """Hang up, from any thread: whoever receives, at either end, finds the link closed."""
        # Not the descriptor itself: a thread that reads from it could find another file under its number.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as pipe:
            pipe.shutdown(socket.SHUT_RDWR)

    def _write(self, parcel: bytes) -> None:
        left = memoryview(parcel)
        while left:
            left = left[os.write(self._connection.fileno(), left) :]

    def _read(self, most: int) -> None:
        """Read what there is, up to ``most`` bytes; waits only for the first one."""
        try:
            data = os.read(self._connection.fileno(), most)
        except OSError:
            raise LinkClosed from None
        if not data:
            raise LinkClosed
        self._received += data

    def _missing(self) -> int:
        """Bytes that are certainly still to come before a whole parcel is here."""
        here = len(self._received)
        if here < _HEADER.size:
            return _HEADER.size - here
        return max(0, self._end() - here)

    def _end(self) -> int:
        """Where the first parcel ends, of whose header all is here."""
        (size,) = _HEADER.unpack_from(self._received)
        return _HEADER.size + int(size)

    def _unpack(self) -> tuple[Any, ...]:
        end = self._end()
        parcel = bytes(memoryview(self._received)[_HEADER.size : end])
        del self._received[:end]
        messages: tuple[Any, ...] = pickle.loads(parcel)
        return messages


def _parcel(messages: tuple[object, ...]) -> bytes:
    data = pickle.dumps(messages, protocol=pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(len(data)) + data
