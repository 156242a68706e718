"""Host arrays to the device without stalling the host."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray


def staged(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """A host tensor of ``array`` that a copy to ``device`` can read asynchronously: pinned for a GPU."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def upload(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """A copy of ``array`` on ``device``, ordered on the current stream."""
    return staged(array, device).to(device, non_blocking=True)


_INT32 = np.dtype(np.int32)
_ALIGNMENT = 16
"""In int32: a kernel's compiled variant follows from whether its pointers are multiples of 16 bytes."""


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def upload_together(arrays: Sequence[NDArray[np.int32]], device: torch.device) -> list[torch.Tensor]:
    """Copies of int32 ``arrays`` on ``device`` by one transfer, ordered on the current stream.

    Each transfer takes 50 us of the host before the device has work (H200, 2026-12-01).
    """
    ends = np.cumsum([_aligned(array.size) for array in arrays]).tolist()
    host = torch.empty(ends[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
    flat = host.numpy()
    starts = [0, *ends[:-1]]
    for start, array in zip(starts, arrays, strict=True):
        flat[start : start + array.size] = array.ravel()
    there = host.to(device, non_blocking=True)
    return [there[start : start + array.size].view(array.shape) for start, array in zip(starts, arrays, strict=True)]


def overwrite(target: torch.Tensor, array: NDArray[np.generic]) -> None:
    """Copy ``array`` over a static device tensor, ordered on the current stream."""
    target.copy_(staged(array, target.device), non_blocking=True)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all uploads: the allocator gives a block back to the stream that it came from."""
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """This thread's device work runs beside the waves instead of between them, and is done when the block ends."""
    if device.type != "cuda":
        yield
        return
    stream = _side_stream(device)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def stock_pinned_memory(largest: int, count: int = 16) -> None:
    """Leave torch's host allocator with ``count`` free pinned blocks of every size up to ``largest`` bytes.

    It hands blocks out by powers of two and keeps what it got; without this a wave that finds more copies under way
    than any before it waits for the driver (40 us and more under load; H200, 2026-12-01).
    """
    sizes = [1 << power for power in range(2, largest.bit_length() + 1)]
    blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes for _ in range(count)]
    del blocks


class StaticBlock:
    """Named int32 tensors in one static device allocation, rewritten by one copy.

    ``shapes`` gives the fields; each starts at zero, and at a multiple of 64 bytes. :meth:`write` fills what it is
    given into a fresh pinned buffer, every other entry with ``fill``, so nothing of an earlier layout survives. A
    wave's layout took a dozen copies of 20 us each on the host (H200, 2026-11-29), which a graph of 3 ms waits for.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device, *, fill: int = 0) -> None:
        self.fill = fill
        self._shapes = dict(shapes)
        sizes = [math.prod(shape) for shape in self._shapes.values()]
        starts = list(itertools.accumulate(map(_aligned, sizes), initial=0))
        self._offsets = {name: _INT32.itemsize * start for name, start in zip(self._shapes, starts, strict=False)}
        self._flat = torch.full((starts[-1],), fill, dtype=torch.int32, device=device)
        self._blank: tuple[torch.Tensor, dict[str, NDArray[np.int32]]] | None = None
        self._fields = {
            name: self._flat[start : start + size].view(shape)
            for (name, shape), start, size in zip(self._shapes.items(), starts, sizes, strict=False)
        }

    def __getitem__(self, name: str) -> torch.Tensor:
        """The device tensor of a field."""
        return self._fields[name]

    def prepare(self) -> None:
        """Have the next write's buffer ready, for callers with time to spare now and none then."""
        if self._blank is None:
            self._blank = self._fresh()

    def write(self, fields: Mapping[str, NDArray[np.integer]]) -> None:
        """Overwrite all fields: ``fields`` from index 0 of each axis on, ``fill`` beyond, ordered on the stream."""
        host, places = self._blank or self._fresh()
        self._blank = None
        for name, values in fields.items():
            places[name][tuple(map(slice, values.shape))] = values
        self._flat.copy_(host, non_blocking=True)

    def _fresh(self) -> tuple[torch.Tensor, dict[str, NDArray[np.int32]]]:
        """A pinned buffer full of ``fill`` and its fields: no copy that is still under way reads it."""
        host = torch.empty(len(self._flat), dtype=torch.int32, pin_memory=self._flat.device.type == "cuda")
        flat = host.numpy()
        flat.fill(self.fill)
        places = {name: np.ndarray(shape, _INT32, flat, self._offsets[name]) for name, shape in self._shapes.items()}
        return host, places
