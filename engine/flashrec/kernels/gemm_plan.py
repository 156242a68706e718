"""Tile sizes of a matrix product, by shape. Only ``block_k`` could show in the bits, and M has no say in it."""

from __future__ import annotations

from dataclasses import dataclass

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
AT_ONCE = 264
"""FP8 tiles of 64 x 64 that 132 multiprocessors hold at once with six stages each."""
WITH_FOUR_STAGES = 396
"""The same with four."""


def small_tiles(rows: int, outs: int) -> int:
    """How many tiles of 64 x 64 the output has."""
    return ceil_div(outs, 64) * ceil_div(rows, 64)


def is_small(rows: int, outs: int) -> bool:
    """Whether small tiles stream the weights faster than cuBLASLt's large ones: a question of shape alone.

    H200, 2026-11-30, FP8, us, ours / ``torch._scaled_mm``: [4,096, 2,048] at M = 50: 7.1 / 9.2, 256: 7.6 / 9.5,
    512: 10.3 / 10.2; [2,048, 2,048] at 512: 7.2 / 9.2; [12,288, 2,048] at 64: 10.9 / 13.1, 320: 20 / 31,
    512: 27 / 23; [2,048, 6,144] at 16: 11.4 / 18.3, 512: 14.9 / 19.2.
    """
    return rows <= FEW_ROWS or small_tiles(rows, outs) <= AT_ONCE


def block_k_of(itemsize: int) -> int:
    """Columns of K in a tile: 128 bytes, or half of what a float32 product sums from zero."""
    return 128 // itemsize if itemsize < 4 else 16


def plan_gemm(rows: int, outs: int, itemsize: int) -> GemmPlan:
    """Tiles for a product of ``x[rows, K]`` and ``w[outs, K]`` of ``itemsize`` bytes an element.

    The best of 40 tried, or within 5 % of it, for most shapes of :func:`is_small` (H200, 2026-11-30).
    """
    block_k = block_k_of(itemsize)
    if small_tiles(rows, outs) > WITH_FOUR_STAGES and itemsize < 4:  # float32 spills in a large tile
        return _large_tile(rows, outs, block_k)
    most = max(16, next_power_of_2(rows))
    fitting = [size for size in (16, 32, 64) if ceil_div(outs, 64) * ceil_div(rows, size) <= AT_ONCE]
    if fitting and itemsize < 4:
        return GemmPlan(block_k, 64, min(fitting[0], most), 4, 6)
    return GemmPlan(block_k, 64, min(64, most), 4, 4)


def _large_tile(rows: int, outs: int, block_k: int) -> GemmPlan:
    """128 x 64, on 4 warps with two tiles a multiprocessor or on 8 with three: whichever needs fewer rounds."""
    tiles = ceil_div(outs, 128) * ceil_div(rows, 64)
    if ceil_div(tiles, AT_ONCE) <= ceil_div(tiles, WITH_FOUR_STAGES):
        return GemmPlan(block_k, 128, 64, 4, 4)
    return GemmPlan(block_k, 128, 64, 8, 3)
