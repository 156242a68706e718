"""Memory that tells on a kernel: NaN guard bands around operands and outputs, and outputs that start as NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

GUARD = 64
"""Elements of guard on either side; a multiple of every vector width, so it does not spoil alignment."""


def poison_(tensor: torch.Tensor) -> torch.Tensor:
    """Fills with NaN where the dtype has one (all ones in FP8), with zero in integers: index 0 is in range."""
    if tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point:
        tensor.view(torch.uint8).fill_(0xFF)
    elif tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    else:
        tensor.zero_()
    return tensor


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(*(t.flatten().view(torch.uint8) for t in (a, b)))


@dataclass(slots=True)
class Placed:
    """A tensor inside a poisoned buffer: ``view`` is what the kernel gets, ``before`` the whole buffer's copy."""

    buffer: torch.Tensor
    view: torch.Tensor
    writable: bool
    before: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.before = self.buffer.clone()

    def intact(self) -> bool:
        """Whether everything that the kernel had no business to write is as it was."""
        if self.writable:
            now = self.buffer.clone()
            inside = now.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset())
            was = self.before.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset())
            inside.copy_(was)
            return _same_bytes(now, self.before)
        return _same_bytes(self.buffer, self.before)


def place(tensor: torch.Tensor, *, pad: int = 0, offset: int = 0, writable: bool = False) -> Placed:
    """Copies ``tensor`` into a poisoned buffer: rows ``pad`` elements further apart, start ``offset`` further on.

    The last axis stays contiguous; ``pad`` is for tensors of two axes.
    """
    if tensor.ndim == 0 or tensor.numel() == 0:
        return Placed(tensor.clone(), tensor, writable)
    row = tensor.shape[-1] + pad if tensor.ndim == 2 else tensor.shape[-1]
    strides = list(torch.empty(tensor.shape, device="meta").stride())
    if tensor.ndim == 2:
        strides[0] = row
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, strides, strict=True))
    buffer = poison_(torch.empty(extent + 2 * GUARD + offset, dtype=tensor.dtype, device=tensor.device))
    view = buffer.as_strided(tensor.shape, strides, GUARD + offset)
    view.copy_(tensor)
    return Placed(buffer, view, writable)


class PoisonedOutputs(TorchFunctionMode):
    """While active, ``torch.empty`` returns NaN-filled tensors with guard bands; ``intact`` checks the bands."""

    def __init__(self) -> None:
        super().__init__()
        self.placed: list[tuple[torch.Tensor, int]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is not torch.empty:
            return func(*args, **kwargs)
        shape = torch.Size(args[0] if len(args) == 1 and not isinstance(args[0], int) else args)
        size = shape.numel()
        buffer = poison_(func(size + 2 * GUARD, **kwargs))
        self.placed.append((buffer, size))
        return buffer[GUARD : GUARD + size].view(shape)

    def intact(self, returned: Iterable[torch.Tensor] = ()) -> bool:
        """Whether every band still holds what :func:`poison_` left there, and so does the room behind those
        ``returned`` that are the first part of what was allocated."""
        ends: dict[int, int] = {}
        for tensor in returned:
            storage = tensor.untyped_storage().data_ptr()
            ends[storage] = max(ends.get(storage, 0), int(tensor.storage_offset()) + tensor.numel())
        for buffer, size in self.placed:
            end = ends.get(buffer.untyped_storage().data_ptr(), GUARD + size)
            for band in (buffer[:GUARD], buffer[end:]):
                if not _same_bytes(band, poison_(band.clone())):
                    return False
        return True
