"""Row tiles: the unit of attention work, at most ``rows_per_tile`` consecutive query rows of one request."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

TILE_M = 64
"""Matrix rows of one attention program: query rows times the query heads that share a K/V head.

H200, 2026-11-29, 16/8 heads of 128, pages of 64: 64 rows on 4 warps beat 128 on 8 in every shape tried; causal
8 x 2,465: 456 us against 504, decode 8 x 512 rows over 2,465: 232 us against 266."""

TALL_TILE_M = 128
"""The same of a program of :mod:`flashrec.kernels.prefill_attention_gluon`."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads, pages and dtype of a pool of keys and values, and the query heads that read it."""

    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    kv_dtype: torch.dtype


class RowTiles(NamedTuple):
    """Three int32 [num_tiles] tensors. A padding tile has ``rows`` 0 and is skipped."""

    request: torch.Tensor
    row0: torch.Tensor
    rows: torch.Tensor


def rows_per_tile(num_q_heads: int, num_kv_heads: int, tile_m: int = TILE_M) -> int:
    """Query rows of one tile of ``tile_m`` matrix rows for this head layout: a power of two, at least 1."""
    group = num_q_heads // num_kv_heads
    return max(1, tile_m // (1 << (group - 1).bit_length()))


def count_row_tiles(rows: Sequence[int], tile: int) -> int:
    """Tiles that requests with ``rows`` query rows each need."""
    return sum(-(-n // tile) for n in rows)


def row_tiles(rows: Sequence[int], tile: int, capacity: int | None = None) -> RowTiles:
    """:func:`tile_table` as tensors, on the host."""
    return RowTiles(*torch.from_numpy(tile_table(rows, tile, capacity)).unbind(0))


def tile_table(rows: Sequence[int], tile: int, capacity: int | None = None) -> NDArray[np.int32]:
    """Cuts each request's rows into tiles; request ``i`` starts where ``i - 1`` ended: int32 [3, num_tiles].

    ``capacity`` pads the result to a fixed number of tiles (a captured graph's); ``ValueError`` if too small.
    """
    tiles = [-(-n // tile) for n in rows]
    needed = sum(tiles)
    size = needed if capacity is None else capacity
    if needed > size:
        raise ValueError(f"row tiles: {needed} tiles do not fit a capacity of {size}; enlarge the bucket")
    # All tiles but a request's last are whole: each begins short of a multiple by what the last ones before it lack.
    lacking = list(itertools.accumulate((count * tile - n for count, n in zip(tiles, rows, strict=True)), initial=0))
    repeats = np.array([*tiles, 1])
    bounds = np.arange(0, needed * tile + 1, tile, dtype=np.int32)
    bounds -= np.array(lacking, dtype=np.int32).repeat(repeats)
    table = np.zeros((3, size), dtype=np.int32)
    table[0, :needed] = np.arange(len(repeats)).repeat(repeats)[:-1]
    table[1, :needed] = bounds[:-1]
    np.subtract(bounds[1:], bounds[:-1], out=table[2, :needed])
    return table
