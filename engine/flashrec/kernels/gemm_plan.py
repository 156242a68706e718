"""Tile sizes and schedule of a matrix product. Only the weight's shape decides anything that shows in the bits."""

from __future__ import annotations

from dataclasses import dataclass

from flashrec.kernels._triton import ceil_div, next_power_of_2


@dataclass(frozen=True, slots=True)
class GemmPlan:
    """Tile sizes and schedule. Only ``splits`` and ``block_k`` decide bits, and M has no say in those."""

    splits: int
    block_k: int
    block_out: int
    block_rows: int
    across_programs: bool
    warps: int
    stages: int


FULL_CHIP = 100
"""Tiles from which a larger tile pays on a Hopper's 132 multiprocessors."""
SPLIT_SIZE = 4096
"""K above this is cut in two: one multiprocessor would stream a weight column tile for too long."""
LARGE_TILES = ((256, 128, 8, 3), (128, 128, 8, 4), (128, 64, 4, 4))
"""(block_out, block_rows, warps, stages), best first for many rows."""


def fixed_splits(size: int) -> int:
    """How many chunks K is cut into: a function of the weight's shape, never of the batch.

    H200, FP8, 2026-11-29, us with 1 / 2 / 4 chunks: K = 6,144, M = 50: 11.6 / 9.0 / 8.8; M = 4,096: 74 / 89 / 94;
    K = 2,048, M = 50: 6.1 / 6.0 / 6.3.
    """
    return 2 if size > SPLIT_SIZE else 1


def plan_gemm(rows: int, outs: int, size: int, itemsize: int) -> GemmPlan:
    """Schedule for a product of ``x[rows, size]`` and ``w[outs, size]`` of ``itemsize`` bytes an element.

    H200, 2026-11-29, four FP8 products of a Qwen3-1.7B layer, us against ``torch._scaled_mm`` with fast
    accumulation: M = 16: 30 / 49, 50: 32 / 48, 128: 34 / 48, 400: 64 / 61, 1,600: 161 / 137, 4,096: 368 / 293.
    """
    splits = fixed_splits(size)
    block_k = 128 // itemsize
    if rows > 64 and itemsize < 4:  # float32 runs on the ordinary cores: a large tile spills
        for block_out, block_rows, warps, stages in LARGE_TILES:
            spills = splits > 1 and block_out * block_rows > 128 * 128
            tiles = ceil_div(outs, block_out) * ceil_div(rows, block_rows)
            if tiles >= FULL_CHIP and not spills:
                return GemmPlan(splits, block_k, block_out, block_rows, False, warps, stages)
    block_rows = min(64, max(16, next_power_of_2(rows)))
    tiles = ceil_div(outs, 64) * ceil_div(rows, block_rows)
    return GemmPlan(splits, block_k, 64, block_rows, splits > 1, 4, 4 if tiles > FULL_CHIP else 6)
