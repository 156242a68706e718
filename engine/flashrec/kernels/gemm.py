"""Matrix products that add up K in order, from zero, in one program a tile: a row's bits do not depend on M.

The weight is the matrix unit's M side and the rows its N side, which can be as narrow as 16: every batch size then
runs the same instruction family with the same accumulation. It is also that of ``torch._scaled_mm`` with fast
accumulation, bit for bit (H200, torch 2.11, 2026-11-30: four shapes, M from 1 to 4,096), so that the two can
share the work by the number of rows; ``ops`` proves it on the device before it relies on it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from flashrec.kernels._triton import (
    MODE,
    TritonMode,
    after_previous,
    ceil_div,
    descriptor,
    jit,
    overlap,
    since_hopper,
    tl,
)
from flashrec.kernels.gemm_plan import GemmPlan, block_k_of, plan_gemm, with_room

FLOAT32_CHUNK = 32
"""Columns of K that a float32 product sums from zero before it adds them to the total: in one chain rounding errors
add up to several times those of a library. Two tiles, since the compiler would fuse a single one into the chain."""


POINTER_WARPS = 8
"""Without the copy engine a tile is as many addresses in registers as it has elements: on 4 warps they spill, and of
more columns than :func:`block_k_of` on 8."""


@jit
def _load_tiles(
    x: tl.tensor,
    w: tl.tensor,
    row0: tl.tensor,
    out0: tl.tensor,
    offset: tl.tensor,
    rows: tl.tensor,
    outs: tl.tensor,
    size: tl.tensor,
    x_stride: tl.tensor,
    w_stride: tl.tensor,
    DESCRIPTOR: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """Device: the weight's tile [BLOCK_OUT, BLOCK_K] and the rows' [BLOCK_K, BLOCK_ROWS] at column ``offset``."""
    if DESCRIPTOR:
        w_tile = w.load([out0, offset])
        x_tile = x.load([row0, offset]).T
    else:
        k = offset + tl.arange(0, BLOCK_K)
        row = row0 + tl.arange(0, BLOCK_ROWS)
        column = out0 + tl.arange(0, BLOCK_OUT)
        w_mask = (column < outs)[:, None] & (k < size)[None, :]
        x_mask = (row < rows)[None, :] & (k < size)[:, None]
        w_tile = tl.load(w + column.to(tl.int64)[:, None] * w_stride + k[None, :], mask=w_mask, other=0.0)
        x_tile = tl.load(x + row.to(tl.int64)[None, :] * x_stride + k[:, None], mask=x_mask, other=0.0)
    return w_tile, x_tile


def _trace_name(variant: Any) -> str:
    """What a trace calls a compiled variant: by the operands' type, as a reader of the trace counts them."""
    return "gemm_e4m3" if variant.constants["SCALED"] else "gemm_plain"


@partial(jit, name=_trace_name, varying=("rows",))
def _gemm_kernel(
    x: tl.tensor,
    x_scale: tl.tensor,
    w: tl.tensor,
    w_scale: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    outs: tl.tensor,
    size: tl.tensor,
    x_stride: tl.tensor,
    w_stride: tl.tensor,
    out_stride: tl.tensor,
    SCALED: tl.constexpr,
    CHUNK: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One tile of ``out[rows, outs]`` a program.

    ``x[rows, size]``, ``w[outs, size]`` by row stride or as tensor descriptors; ``x_scale[rows]``,
    ``w_scale[outs]`` float32 when ``SCALED``: the channel's first, then the token's, as ``torch._scaled_mm`` does.
    K is summed inside the matrix unit, or, with ``CHUNK`` above 0, that many columns at a time.
    """
    after_previous(OVERLAP)
    row_tiles = tl.cdiv(rows, BLOCK_ROWS)
    tile = tl.program_id(0)
    row0 = (tile % row_tiles) * BLOCK_ROWS
    out0 = (tile // row_tiles) * BLOCK_OUT
    total = tl.zeros((BLOCK_OUT, BLOCK_ROWS), dtype=tl.float32)
    if CHUNK == 0:
        for offset in range(0, size, BLOCK_K):
            w_tile, x_tile = _load_tiles(
                x,
                w,
                row0,
                out0,
                offset,
                rows,
                outs,
                size,
                x_stride,
                w_stride,
                DESCRIPTOR,
                BLOCK_OUT,
                BLOCK_ROWS,
                BLOCK_K,
            )
            total = tl.dot(w_tile, x_tile, total, input_precision="ieee")
    else:
        for begin in range(0, size, CHUNK):
            part = tl.zeros((BLOCK_OUT, BLOCK_ROWS), dtype=tl.float32)
            for offset in range(begin, begin + CHUNK, BLOCK_K):
                w_tile, x_tile = _load_tiles(
                    x,
                    w,
                    row0,
                    out0,
                    offset,
                    rows,
                    outs,
                    size,
                    x_stride,
                    w_stride,
                    DESCRIPTOR,
                    BLOCK_OUT,
                    BLOCK_ROWS,
                    BLOCK_K,
                )
                part = tl.dot(w_tile, x_tile, part, input_precision="ieee")
            total += part
    row = row0 + tl.arange(0, BLOCK_ROWS)
    column = out0 + tl.arange(0, BLOCK_OUT)
    if SCALED:
        channel_scale = tl.load(w_scale + column, mask=column < outs, other=0.0)
        token_scale = tl.load(x_scale + row, mask=row < rows, other=0.0)
        total = total * channel_scale[:, None] * token_scale[None, :]
    target = out + row.to(tl.int64)[None, :] * out_stride + column[:, None]
    mask = (row < rows)[None, :] & (column < outs)[:, None]
    tl.store(target, total.to(out.dtype.element_ty), mask=mask)


def _aligned(matrix: torch.Tensor) -> bool:
    """Whether the copy engine can fetch tiles of ``matrix``: 16-byte rows from a 16-byte address."""
    row_bytes = matrix.stride(0) * matrix.element_size()
    return matrix.data_ptr() % 16 == 0 and row_bytes % 16 == 0 and matrix.stride(1) == 1


def linear_triton(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """:func:`flashrec.kernels.linear.linear`: ``x @ w.T`` in ``x.dtype``."""
    return run_gemm(_plan(x, w), x, None, w, None, x.dtype)


def linear_fp8_triton(
    x_fp8: torch.Tensor,
    x_scale: torch.Tensor,
    w_fp8: torch.Tensor,
    w_scale: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """:func:`flashrec.kernels.linear.linear_fp8` for a 16-bit ``out_dtype``: FP8 matrix units add in about 14 bits."""
    return run_gemm(_plan(x_fp8, w_fp8), x_fp8, x_scale, w_fp8, w_scale, out_dtype)


def _plan(x: torch.Tensor, w: torch.Tensor) -> GemmPlan:
    return plan_gemm(x.shape[0], w.shape[0], w.element_size())


def run_gemm(
    plan: GemmPlan,
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    w: torch.Tensor,
    w_scale: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """``x[M, K] @ w[N, K].T``, times both scales where there are some, in ``out_dtype``, under a given plan."""
    rows, size = x.shape
    outs = w.shape[0]
    out = torch.empty(rows, outs, dtype=out_dtype, device=x.device)
    described = _aligned(x) and _aligned(w) and (MODE is TritonMode.INTERPRETER or since_hopper())
    block_k = plan.block_k if described else min(plan.block_k, block_k_of(w.element_size()))
    if rows:
        _gemm_kernel[(ceil_div(outs, plan.block_out) * ceil_div(rows, plan.block_rows),)](
            descriptor(with_room(x, plan.block_rows), [plan.block_rows, block_k]) if described else x,
            out if x_scale is None else x_scale,
            descriptor(w, [plan.block_out, block_k]) if described else w,
            out if w_scale is None else w_scale,
            out,
            rows,
            outs,
            size,
            x.stride(0),
            w.stride(0),
            out.stride(0),
            SCALED=x_scale is not None,
            CHUNK=FLOAT32_CHUNK if x.element_size() == 4 else 0,
            DESCRIPTOR=described,
            BLOCK_OUT=plan.block_out,
            BLOCK_ROWS=plan.block_rows,
            BLOCK_K=block_k,
            num_warps=plan.warps if described else POINTER_WARPS,
            num_stages=plan.stages,
            **overlap(),
        )
    return out
