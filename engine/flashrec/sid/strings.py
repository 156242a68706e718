"""A read-only sequence of strings in two arrays: a million ids cost their bytes, not a million objects."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import overload

import numpy as np
from numpy.typing import NDArray

_RUN = 1 << 16
_TAKE = 1 << 18
_PICK = 1 << 14
_PART = 1 << 20


@dataclass(frozen=True, eq=False)
class StringTable(Sequence[str]):
    """UTF-8 ``blob``, uint8 ``[bytes]``; string ``i`` is ``blob[offsets[i]:offsets[i + 1]]``.

    ``offsets`` is int64 ``[len + 1]`` and begins with 0.
    """

    blob: NDArray[np.uint8]
    offsets: NDArray[np.int64]

    @classmethod
    def of(cls, texts: list[str]) -> StringTable:
        """The table of ``texts``. Raises :class:`UnicodeEncodeError` for a lone surrogate, which UTF-8 cannot hold."""
        joined = "".join(texts)
        parts: list[str] | list[bytes] = texts if joined.isascii() else [text.encode() for text in texts]
        offsets = np.zeros(len(texts) + 1, dtype=np.int64)
        np.cumsum(np.fromiter(map(len, parts), dtype=np.int64, count=len(parts)), out=offsets[1:])
        return cls(np.frombuffer(joined.encode(), dtype=np.uint8), offsets)

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

    def is_plain(self) -> bool:
        """Whether every string may stand between quotes in JSON as it is."""
        parts = (self.blob[first : first + _PART] for first in range(0, len(self.blob), _PART))
        return not any(bool(((part < 0x20) | (part == 0x22) | (part == 0x5C)).any()) for part in parts)

    def slices(self, positions: NDArray[np.integer]) -> list[bytes]:
        """The UTF-8 of the strings at ``positions``, int ``[n]``."""
        begin, end = self.offsets[positions], self.offsets[positions + 1]
        if len(self.blob):
            self.blob.take(begin, mode="clip")  # fetches from memory side by side what is read one by one below
        bounds = map(slice, begin.tolist(), end.tolist())
        return list(map(memoryview.tobytes, map(self.blob.data.__getitem__, bounds)))

    def pick(self, positions: NDArray[np.integer]) -> list[str]:
        """The strings at ``positions``, int ``[n]``: a few hundred in half the time of :meth:`take`."""
        # In slices, as in take.
        slices = [positions[first : first + _PICK] for first in range(0, len(positions), _PICK)]
        return [text for part in slices for text in self._pick(part)]

    def _pick(self, positions: NDArray[np.integer]) -> list[str]:
        last = self.offsets[positions + 1]
        lengths = last - self.offsets[positions]
        ends = lengths.cumsum()
        data = self.blob[np.arange(lengths.sum()) + (last - ends).repeat(lengths)].tobytes()
        bounds = pairwise([0, *ends.tolist()])
        if data.isascii():
            text = data.decode()
            return [text[begin:end] for begin, end in bounds]
        return [data[begin:end].decode() for begin, end in bounds]

    def take(self, positions: NDArray[np.integer]) -> StringTable:
        """The strings at ``positions``, int ``[n]``, in that order."""
        offsets = np.zeros(len(positions) + 1, dtype=np.int64)
        # In slices: the temporary arrays are several times the size of what they gather.
        slices = [slice(first, first + _TAKE) for first in range(0, len(positions), _TAKE)]
        for part in slices:
            chosen = positions[part].astype(np.int64)
            offsets[1:][part] = self.offsets[chosen + 1] - self.offsets[chosen]
        np.cumsum(offsets, out=offsets)
        blob = np.empty(int(offsets[-1]), dtype=np.uint8)
        for part in slices:
            chosen = positions[part].astype(np.int64)
            first, last = offsets[:-1][part], offsets[1:][part]
            shift = np.repeat(self.offsets[chosen] - first, last - first)
            begin, end = int(first[0]), int(last[-1])
            shift += np.arange(begin, end)
            blob[begin:end] = self.blob[shift]
        return StringTable(blob, offsets)


class StringBuilder:
    """Collects strings into a :class:`StringTable`."""

    def __init__(self) -> None:
        self._blob = bytearray()
        self._offsets = array("q", [0])

    def add(self, text: str) -> None:
        """Raises :class:`UnicodeEncodeError` for a lone surrogate."""
        self._blob += text.encode()
        self._offsets.append(len(self._blob))

    def extend(self, texts: StringTable) -> None:
        """Add many at once."""
        self._offsets.frombytes((texts.offsets[1:] + len(self._blob)).tobytes())
        self._blob += texts.blob.tobytes()

    def finish(self) -> StringTable:
        """The table of what was added."""
        return StringTable(np.frombuffer(self._blob, dtype=np.uint8), np.frombuffer(self._offsets, dtype=np.int64))
