"""Tile sizes of a matrix product, by shape. None of them shows in the bits.

The matrix unit takes 32 bytes of K at a time and adds them to the total in order, however many a tile holds.
"""

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
ONE_EACH = 132
"""Multiprocessors of an H200, or an H100 with SXM."""
AT_ONCE = 264
"""FP8 tiles of 64 x 64 that these hold at once with six stages each."""
WITH_FOUR_STAGES = 396
"""The same with four."""


def small_tiles(rows: int, outs: int) -> int:
    """How many tiles of 64 x 64 the output has."""
    return ceil_div(outs, 64) * ceil_div(rows, 64)


def is_small(rows: int, outs: int) -> bool:
    """Whether small tiles stream the weights faster than cuBLASLt's large ones: a question of shape alone.

    H200, 2026-11-30, with the tiles of then, FP8, us, ours / ``torch._scaled_mm``: [4,096, 2,048] at M = 50: 7.1 / 9.2,
    256: 7.6 / 9.5, 512: 10.3 / 10.2; [2,048, 2,048] at 512: 7.2 / 9.2; [12,288, 2,048] at 64: 10.9 / 13.1, 320:
    20 / 31, 512: 27 / 23; [2,048, 6,144] at 16: 11.4 / 18.3, 512: 14.9 / 19.2.
    """
    return rows <= FEW_ROWS or small_tiles(rows, outs) <= AT_ONCE


def block_k_of(itemsize: int) -> int:
    """Columns of K in a tile: 128 bytes, or half of what a float32 product sums from zero."""
    return 128 // itemsize if itemsize < 4 else 16


def plan_gemm(rows: int, outs: int, itemsize: int) -> GemmPlan:
    """Tiles for a product of ``x[rows, K]`` and ``w[outs, K]`` of ``itemsize`` bytes an element.

    As few rows a tile as leave each multiprocessor one tile at most, which then takes twice the columns of K at a
    time; where there are more tiles, 64 rows. H200, 2026-12-02, FP8, us, so / the smallest of which two fit a
    multiprocessor (the rule until then), [4,096, 2,048] at M = 50: 5.2 / 7.0; [2,048, 2,048] at 50: 4.4 / 4.9, 256:
    5.0 / 6.6; [2,048, 6,144] at 50: 9.4 / 10.4, 256: 10.8 / 14.9. The weights' way from memory is the lesser part:
    from the L2 cache the same three took 0.2, 0.4 and 1.0 us less at M = 50 under the old rule.
    """
    block_k = block_k_of(itemsize)
    tiles = small_tiles(rows, outs)
    if itemsize == 4:  # spills in a large tile
        return GemmPlan(block_k, 64, min(64, _fewest(rows)), 4, 4)
    if tiles > WITH_FOUR_STAGES:
        return _large_tile(rows, outs, block_k)
    for block_rows in (16, 32, 64):
        if ceil_div(outs, 64) * ceil_div(rows, block_rows) <= ONE_EACH:
            return GemmPlan(2 * block_k, 64, block_rows, 4, 4)
    return GemmPlan(block_k, 64, min(64, _fewest(rows)), 4, 6 if tiles <= AT_ONCE else 4)


def _fewest(rows: int) -> int:
    """Rows of a tile that holds them all, as few as the matrix unit takes."""
    return max(16, next_power_of_2(rows))


def _large_tile(rows: int, outs: int, block_k: int) -> GemmPlan:
    """128 x 64, on 4 warps with two tiles a multiprocessor or on 8 with three: whichever needs fewer rounds."""
    tiles = ceil_div(outs, 128) * ceil_div(rows, 64)
    if ceil_div(tiles, AT_ONCE) <= ceil_div(tiles, WITH_FOUR_STAGES):
        return GemmPlan(block_k, 128, 64, 4, 4)
    return GemmPlan(block_k, 128, 64, 8, 3)
