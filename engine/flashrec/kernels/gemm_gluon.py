"""FP8 products on a Hopper, for few rows: the weights are on their way before the kernel ahead has ended.

A row gets the same bits as from :mod:`flashrec.kernels.gemm`: the same tiles, added up by the same instructions in the
same order. What differs is when they are fetched. With few rows a layer is a chain of short kernels, each of which
waits for the one before; a weight needs nobody's result, so a program fills its shared memory with it first.

H200, torch 2.11, 2026-12-03, the four products of a layer and the small kernels between them, in us, Triton's / these
but waiting first / these: 16 rows 31.3 / 27.8 / 26.2, 64 34.2 / 30.8 / 29.2, 256 46.7 / 43.6 / 41.4, 384 64.4 / 62.4 /
60.1.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from flashrec.kernels._gluon import after_previous, gl, gluon_jit, hopper, tile_descriptor
from flashrec.kernels._triton import ceil_div
from flashrec.kernels.gemm_plan import GemmPlan, plan_gemm, with_room


def unfit(x: torch.Tensor, w: torch.Tensor) -> str:
    """Why :func:`linear_fp8_gluon` does not take these operands; empty if it does."""
    for name, matrix in (("x", x), ("w", w)):
        if matrix.data_ptr() % 16 or matrix.stride(0) % 16 or matrix.stride(1) != 1:
            return f"rows of {name} do not begin at multiples of 16 bytes"
    return ""


@gluon_jit
def _fetch(
    tiles: gl.tensor, first: gl.tensor, step: gl.tensor, ring: gl.tensor, full: gl.tensor, STAGES: gl.constexpr
) -> None:
    """Device: starts fetching tile ``step`` of a row of tiles into its place in the ring, if there is one."""
    place = step % STAGES
    columns: gl.constexpr = tiles.block_type.shape[1]
    there = step * columns < tiles.shape[1]
    corner = [first, step * columns]
    hopper.tma.async_copy_global_to_shared(tiles, corner, full.index(place), ring.index(place), pred=there)


@gluon_jit
def _multiply(
    w_ring: gl.tensor, x_ring: gl.tensor, full: gl.tensor, step: gl.tensor, total: gl.tensor, STAGES: gl.constexpr
) -> gl.tensor:
    """Device: waits for the tiles of ``step`` and starts adding their product; the one before has ended then."""
    place = step % STAGES
    hopper.mbarrier.wait(full.index(place), (step // STAGES) & 1)
    rows = x_ring.index(place).permute((1, 0))
    total = hopper.warpgroup_mma(w_ring.index(place), rows, total, is_async=True)
    return hopper.warpgroup_mma_wait(1, deps=[total])


def _trace_name(variant: Any) -> str:
    """Begins as that of :mod:`flashrec.kernels.gemm`, by which a reader of a trace knows an FP8 product."""
    return "gemm_e4m3_gluon"


@functools.partial(gluon_jit, name=_trace_name, varying=("rows",))
def _gemm_kernel(
    x: gl.tensor,
    x_scale: gl.tensor,
    w: gl.tensor,
    w_scale: gl.tensor,
    out: gl.tensor,
    rows: gl.tensor,
    outs: gl.tensor,
    out_stride: gl.tensor,
    BLOCK_OUT: gl.constexpr,
    BLOCK_ROWS: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
) -> None:
    """One tile of ``out[rows, outs]`` a program. ``x[rows, size]``, ``w[outs, size]`` by descriptor; scales float32."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_ROWS, 32])
    by_row: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, num_warps], [0, 1])
    nbytes: gl.constexpr = w.block_type.nbytes + x.block_type.nbytes
    w_ring = gl.allocate_shared_memory(w.dtype, [STAGES, BLOCK_OUT, BLOCK_K], w.layout)
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_ROWS, BLOCK_K], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    row_tiles = (rows + BLOCK_ROWS - 1) // BLOCK_ROWS
    row0 = gl.program_id(0) % row_tiles * BLOCK_ROWS
    out0 = gl.program_id(0) // row_tiles * BLOCK_OUT
    steps = (w.shape[1] + BLOCK_K - 1) // BLOCK_K
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(stage), count=1)
    hopper.fence_async_shared()
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.expect(full.index(stage), nbytes, pred=stage < steps)
        _fetch(w, out0, stage, w_ring, full, STAGES)
    channel = out0 + gl.arange(0, BLOCK_OUT, layout=gl.SliceLayout(1, mma))
    channel_scale = gl.load(w_scale + channel, mask=channel < outs, other=0.0)
    after_previous()
    for stage in gl.static_range(STAGES):
        _fetch(x, row0, stage, x_ring, full, STAGES)
    token = row0 + gl.arange(0, BLOCK_ROWS, layout=gl.SliceLayout(0, mma))
    token_scale = gl.load(x_scale + token, mask=token < rows, other=0.0)
    total = gl.zeros([BLOCK_OUT, BLOCK_ROWS], gl.float32, mma)
    total = _multiply(w_ring, x_ring, full, 0, total, STAGES)
    for step in range(1, steps):
        total = _multiply(w_ring, x_ring, full, step, total, STAGES)
        later = step - 1 + STAGES
        hopper.mbarrier.expect(full.index(later % STAGES), nbytes, pred=later < steps)
        _fetch(w, out0, later, w_ring, full, STAGES)
        _fetch(x, row0, later, x_ring, full, STAGES)
    total = hopper.warpgroup_mma_wait(0, deps=[total])
    scaled = total * channel_scale[:, None] * token_scale[None, :]
    result = gl.convert_layout(scaled.to(out.dtype.element_ty), by_row)
    row = row0 + gl.arange(0, BLOCK_ROWS, layout=gl.SliceLayout(0, by_row))
    column = out0 + gl.arange(0, BLOCK_OUT, layout=gl.SliceLayout(1, by_row))
    target = out + row.to(gl.int64)[None, :] * out_stride + column[:, None]
    gl.store(target, result, mask=(row < rows)[None, :] & (column < outs)[:, None])


def linear_fp8_gluon(
    x_fp8: torch.Tensor,
    x_scale: torch.Tensor,
    w_fp8: torch.Tensor,
    w_scale: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """:func:`flashrec.kernels.linear.linear_fp8` for a 16-bit ``out_dtype``, on a Hopper.

    ``w_fp8`` and ``w_scale`` are read while the kernel launched last still runs: it must not be writing them. Raises
    ``ValueError`` for operands that are :func:`unfit`.
    """
    reason = unfit(x_fp8, w_fp8)
    if reason:
        raise ValueError(f"FP8 product: {reason}; take the Triton kernel for them")
    plan = plan_gemm(x_fp8.shape[0], w_fp8.shape[0], w_fp8.element_size())
    return run_gemm(plan, x_fp8, x_scale, w_fp8, w_scale, out_dtype)


def run_gemm(
    plan: GemmPlan,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """:func:`linear_fp8_gluon` under a given plan."""
    rows, outs = x.shape[0], w.shape[0]
    out = torch.empty(rows, outs, dtype=out_dtype, device=x.device)
    if rows:
        _gemm_kernel[(ceil_div(outs, plan.block_out) * ceil_div(rows, plan.block_rows),)](
            tile_descriptor(with_room(x, plan.block_rows), plan.block_rows, plan.block_k),
            x_scale,
            tile_descriptor(w, plan.block_out, plan.block_k),
            w_scale,
            out,
            rows,
            outs,
            out.stride(0),
            BLOCK_OUT=plan.block_out,
            BLOCK_ROWS=plan.block_rows,
            BLOCK_K=plan.block_k,
            STAGES=plan.stages,
            num_warps=plan.warps,
            launch_pdl=True,
        )
    return out
