"""The pool of keys and values: pages for prompts, and a region of plain slots for beams."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from flashrec.errors import ConfigError

SCRATCH_PAGE = 0
"""Never handed out: what padded page tables point at."""


def page_table(pages: Sequence[list[int]]) -> NDArray[np.int32]:
    """The pages of several prompts as rows int32 [prompts, most pages], padded with the scratch page."""
    padding = [SCRATCH_PAGE] * max(map(len, pages))
    return np.array([row + padding[len(row) :] for row in pages], dtype=np.int32)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``torch.zeros`` that takes no memory on a CPU before it is written.

    Memory mapped anonymously reads as zero; ``torch.zeros`` writes all of it. With the default of 1 GiB an engine of
    the bundled checkpoint is built in 0.1 s in place of 0.6, and its process stays at 354 MiB in place of 1,430 (an
    x86 machine that others use, one thread, 2026-12-03).
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    try:
        mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        message = f"KV pool: no {size:,} bytes for keys or values ({error}); lower kv_pool_tokens or kv_pool_bytes"
        raise ConfigError(message) from error
    return torch.frombuffer(mapped, dtype=dtype).view(shape)


class PoolExhaustedError(Exception):
    """More pages were asked for than are free; the caller frees or waits."""


@dataclass(slots=True)
class KVPool:
    """Keys and values of all layers, ``k`` and ``v`` [layers, slots, kv_heads, head_dim].

    Slots 0..num_pages*page_size-1 are the context pages; the ``beam_slots`` slots after them hold what beams
    add, addressed as ``beam_base + step * rows + row``. Everything that attention reads has been written here
    first, so a cache hit and a recomputation read the same numbers (SPEC R2). ``k_scale`` and ``v_scale`` are
    per layer: a stored FP8 value times its scale is the key or value.
    """

    k: torch.Tensor
    v: torch.Tensor
    page_size: int
    num_pages: int
    beam_slots: int
    k_scale: tuple[float, ...]
    v_scale: tuple[float, ...]
    _free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        if self.num_pages < 2:
            raise ConfigError(f"kv_pool_tokens: {self.num_pages} pages of {self.page_size} tokens hold no prompt")
        self._free = list(range(self.num_pages - 1, SCRATCH_PAGE, -1))

    @classmethod
    def allocate(
        cls,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_pages: int,
        page_size: int,
        beam_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        k_scale: tuple[float, ...] | None = None,
        v_scale: tuple[float, ...] | None = None,
    ) -> KVPool:
        """Allocate zeroed storage: a page that was never written must not hold NaN, which masks would spread."""
        shape = (num_layers, num_pages * page_size + beam_slots, num_kv_heads, head_dim)
        return cls(
            k=_zeros(shape, dtype, device),
            v=_zeros(shape, dtype, device),
            page_size=page_size,
            num_pages=num_pages,
            beam_slots=beam_slots,
            k_scale=k_scale or (1.0,) * num_layers,
            v_scale=v_scale or (1.0,) * num_layers,
        )

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        return self.k.shape[3]

    @property
    def beam_base(self) -> int:
        """First slot of the beam region."""
        return self.num_pages * self.page_size

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def usable_pages(self) -> int:
        """Pages that can be handed out at all: the scratch page is not one."""
        return self.num_pages - 1

    def take(self, count: int) -> list[int]:
        """Hand out ``count`` pages, lowest first where they are free in a run.

        Raises:
            PoolExhaustedError: fewer are free.
        """
        if count > len(self._free):
            raise PoolExhaustedError(f"{count} pages wanted, {len(self._free)} free")
        taken = self._free[len(self._free) - count :][::-1]
        del self._free[len(self._free) - count :]
        return taken

    def give_back(self, pages: list[int]) -> None:
        """Return pages that nobody reads any more."""
        self._free.extend(reversed(pages))
