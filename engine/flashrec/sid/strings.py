"""A read-only sequence of strings in two arrays: a million ids cost their bytes, not a million objects."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import overload

import numpy as np
from numpy.typing import NDArray

_RUN = 1 << 16
_TAKE = 1 << 20


@dataclass(frozen=True, eq=False)
class StringTable(Sequence[str]):
    """UTF-8 ``blob``, uint8 ``[bytes]``; string ``i`` is ``blob[offsets[i]:offsets[i + 1]]``.

    ``offsets`` is int64 ``[len + 1]``.
    """

    blob: NDArray[np.uint8]
    offsets: NDArray[np.int64]

    @classmethod
    def from_strings(cls, strings: Iterable[str]) -> StringTable:
        """Raises :class:`UnicodeEncodeError` for a lone surrogate, which UTF-8 cannot hold."""
        builder = StringBuilder()
        for text in strings:
            builder.add(text)
        return builder.finish()

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            first, last, step = index.indices(len(self))
            if step == 1:
                return self._run(first, max(first, last))
            return [self[position] for position in range(first, last, step)]
        if not -len(self) <= index < len(self):
            raise IndexError(f"string {index} of {len(self)}")
        position = index % len(self)
        return self.blob[self.offsets[position] : self.offsets[position + 1]].tobytes().decode()

    def __iter__(self) -> Iterator[str]:
        for first in range(0, len(self), _RUN):
            yield from self._run(first, min(first + _RUN, len(self)))

    def _run(self, first: int, last: int) -> list[str]:
        offsets = self.offsets[first : last + 1].tolist()
        base = offsets[0]
        data = self.blob[base : offsets[-1]].tobytes()
        return [data[begin - base : end - base].decode() for begin, end in pairwise(offsets)]

    def take(self, positions: NDArray[np.integer]) -> StringTable:
        """The strings at ``positions``, int ``[n]``, in that order."""
        lengths = self.offsets[positions + 1] - self.offsets[positions]
        offsets = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(lengths)))
        blob = np.empty(int(offsets[-1]), dtype=np.uint8)
        # In slices: the byte index below is eight times the size of the bytes that it gathers.
        for first in range(0, len(positions), _TAKE):
            last = min(first + _TAKE, len(positions))
            begin, end = offsets[first], offsets[last]
            shift = self.offsets[positions[first:last]] - offsets[first:last]
            blob[begin:end] = self.blob[np.repeat(shift, lengths[first:last]) + np.arange(begin, end)]
        return StringTable(blob, offsets)

    @cached_property
    def _by_hash(self) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
        hashes = np.fromiter(map(hash, self), dtype=np.int64, count=len(self))
        order = np.argsort(hashes, kind="stable")
        return hashes[order], order

    def positions(self, text: str) -> list[int]:
        """Every position that holds ``text``, in order; empty if there is none."""
        hashes, order = self._by_hash
        key = np.int64(hash(text))
        first, last = np.searchsorted(hashes, key, "left"), np.searchsorted(hashes, key, "right")
        return [position for position in order[first:last].tolist() if self[position] == text]


class StringBuilder:
    """Collects strings one by one into a :class:`StringTable`."""

    def __init__(self) -> None:
        self._blob = bytearray()
        self._offsets = array("q", [0])

    def add(self, text: str) -> None:
        """Raises :class:`UnicodeEncodeError` for a lone surrogate."""
        self._blob += text.encode()
        self._offsets.append(len(self._blob))

    def extend(self, texts: list[str]) -> None:
        """Add many at once. Raises :class:`UnicodeEncodeError` for a lone surrogate, having added nothing."""
        joined = "".join(texts)
        parts: list[str] | list[bytes] = texts if joined.isascii() else [text.encode() for text in texts]
        lengths = np.fromiter(map(len, parts), dtype=np.int64, count=len(parts))
        self._offsets.frombytes((np.cumsum(lengths) + len(self._blob)).tobytes())
        self._blob += joined.encode()

    def finish(self) -> StringTable:
        """The table of what was added."""
        return StringTable(np.frombuffer(self._blob, dtype=np.uint8), np.frombuffer(self._offsets, dtype=np.int64))
