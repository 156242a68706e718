"""Tile sizes of a matrix product, by shape. None of them shows in the bits.

The matrix unit takes 32 bytes of K at a time and adds them to the total in order, however many a tile holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashrec.kernels._triton import ceil_div, next_power_of_2


@dataclass(frozen=True, slots=True)
class GemmPlan:
    """Tile sizes and pipeline of one product."""

    block_k: int
    block_out: int
    block_rows: int
    warps: int
    stages: int


FEW_ROWS = 384
MULTIPROCESSORS = 132
"""Of an H200, or an H100 with SXM."""
SHARED_BYTES = 232_448
"""Shared memory of one program at most. Three have 73,728 each at most, beside the 1 KB that a program takes itself."""
TWO_EACH = 2 * MULTIPROCESSORS
THREE_EACH = 3 * MULTIPROCESSORS
TALLEST = 128
"""Rows of the tallest tile."""


def tiles_of(rows: int, outs: int, block_rows: int, block_out: int = 64) -> int:
    """How many tiles the output has."""
    return ceil_div(outs, block_out) * ceil_div(rows, block_rows)


def is_small(rows: int, outs: int) -> bool:
    """Whether small tiles stream the weights faster than cuBLASLt's large ones: a question of shape alone.

    H200, 2026-12-02, FP8, us, ours / ``torch._scaled_mm``: [4,096, 2,048] at M = 64: 5.0 / 8.8, 256: 6.3 / 9.0, 384:
    9.3 / 9.1; [2,048, 2,048] at 512: 6.0 / 8.8; [12,288, 2,048] at 64: 9.7 / 12.2, 128: 11.0 / 10.9, 256: 13.8 / 15.3,
    320: 20.6 / 29.6, 512: 27.7 / 22.6; [2,048, 6,144] at 16: 7.4 / 17.9, 512: 12.3 / 18.4, 640: 21.1 / 18.8.
    """
    return rows <= FEW_ROWS or tiles_of(rows, outs, 64) <= TWO_EACH


def block_k_of(itemsize: int) -> int:
    """Columns of K in a tile: 128 bytes, or half of what a float32 product sums from zero."""
    return 128 // itemsize if itemsize < 4 else 16


def plan_gemm(rows: int, outs: int, itemsize: int) -> GemmPlan:
    """Tiles for a product of ``x[rows, K]`` and ``w[outs, K]`` of ``itemsize`` bytes an element.

    As few rows a tile as leave each multiprocessor one tile at most, which then takes twice the columns of K at a time
    and all of the shared memory for what it fetches ahead: with few tiles a product is bound by how much of the weights
    is under way. Otherwise three tiles share a multiprocessor, while they all fit at once.

    H200, 2026-12-02, FP8, us, so / the smallest tiles of which two fit a multiprocessor (the rule of 2026-11-30):
    [4,096, 2,048] at M = 64: 5.0 / 6.2, 256: 6.3 / 7.2; [2,048, 2,048] at 64: 4.1 / 4.8, 256: 4.8 / 6.5, 512: 6.0 /
    6.7; [2,048, 6,144] at 64: 7.7 / 10.3, 256: 9.3 / 14.4, 512: 12.3 / 14.9; [12,288, 2,048] at 64: 9.7 / 10.4, 256:
    13.8 / 15.7.
    """
    block_k = block_k_of(itemsize)
    if itemsize == 4:  # spills in a large tile
        return GemmPlan(block_k, 64, min(64, _fewest(rows)), 4, 4)
    for block_rows in (16, 32, 64, TALLEST):
        if tiles_of(rows, outs, block_rows) <= MULTIPROCESSORS:
            return GemmPlan(2 * block_k, 64, block_rows, 4, _stages(SHARED_BYTES, block_rows, 256))
    for block_rows in (min(64, _fewest(rows)), TALLEST):
        if tiles_of(rows, outs, block_rows) <= THREE_EACH:
            return GemmPlan(block_k, 64, block_rows, 4, _stages(SHARED_BYTES // 3, block_rows, 128))
    return _large_tile(rows, outs, block_k)


def _stages(shared: int, block_rows: int, width: int) -> int:
    """Tiles of 64 outputs and ``block_rows`` rows, ``width`` bytes wide, that ``shared`` bytes hold, but at most six:
    eight and more are slower for most shapes."""
    return min(6, shared // ((64 + block_rows) * width))


def _fewest(rows: int) -> int:
    """Rows of a tile that holds them all, as few as the matrix unit takes."""
    return max(16, next_power_of_2(rows))


def _large_tile(rows: int, outs: int, block_k: int) -> GemmPlan:
    """128 x 64, on 4 warps with two tiles a multiprocessor or on 8 with three: whichever needs fewer rounds."""
    tiles = tiles_of(rows, outs, 64, 128)
    if ceil_div(tiles, TWO_EACH) <= ceil_div(tiles, THREE_EACH):
        return GemmPlan(block_k, 128, 64, 4, 4)
    return GemmPlan(block_k, 128, 64, 8, 3)


def empty_rows(rows: int, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Unwritten [rows, size] for the rows of a product, with room behind them for the rest of its last tile.

    A tile that ends beyond its tensor is fetched slowly. H200, Triton 3.6, 2026-12-02, us for a [12,288, 2,048] weight
    with / without such room: M = 65: 11.1 / 18.3, 100: 11.0 / 15.0, 128: 11.0 / 11.0.
    """
    return torch.empty(ceil_div(rows, TALLEST) * TALLEST, size, dtype=dtype, device=device)[:rows]


def with_room(x: torch.Tensor, block_rows: int) -> torch.Tensor:
    """``x[rows, K]`` and what lies behind it as far as its last tile, if all of that is in its storage."""
    rows, size = x.shape
    whole = ceil_div(rows, block_rows) * block_rows
    end = x.storage_offset() + (whole - 1) * x.stride(0) + size
    if end * x.element_size() > x.untyped_storage().nbytes():
        return x
    return x.as_strided((whole, size), x.stride())
