"""Matrix products whose reduction order is a function of the weight's shape alone.

``out[M, N] = x[M, K] @ w[N, K].T`` with K cut into a fixed number of chunks. Each chunk is summed on the
tensor cores from zero, and the chunks are added in order. With few rows the chunks go to different programs,
so that all multiprocessors stream weights, and the last program of a tile adds them up; with many rows one
program does all chunks of its tile. Both give a row the same bits, at every M.

The weight is the matrix unit's M side and the rows its N side, which can be as narrow as 16: every batch
size then runs the same instruction family with the same accumulation.
"""

from __future__ import annotations

import torch

from flashrec.kernels._triton import ceil_div, descriptor, jit, tl
from flashrec.kernels.gemm_plan import GemmPlan, plan_gemm


@jit
def _chunk_product(
    x: tl.tensor,
    w: tl.tensor,
    row0: tl.tensor,
    out0: tl.tensor,
    rows: tl.tensor,
    outs: tl.tensor,
    begin: tl.tensor,
    size: tl.tensor,
    x_stride: tl.tensor,
    w_stride: tl.tensor,
    CHUNK: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """Device: one chunk's product [BLOCK_OUT, BLOCK_ROWS] in float32, from zero."""
    total = tl.zeros((BLOCK_OUT, BLOCK_ROWS), dtype=tl.float32)
    if DESCRIPTOR:
        for offset in range(0, CHUNK, BLOCK_K):
            w_tile = w.load([out0, begin + offset])
            x_tile = x.load([row0, begin + offset])
            total = tl.dot(w_tile, x_tile.T, total, input_precision="ieee")
    else:
        row = row0 + tl.arange(0, BLOCK_ROWS)
        out = out0 + tl.arange(0, BLOCK_OUT)
        x_rows = x + row.to(tl.int64)[None, :] * x_stride
        w_rows = w + out.to(tl.int64)[:, None] * w_stride
        for offset in range(0, CHUNK, BLOCK_K):
            column = begin + offset + tl.arange(0, BLOCK_K)
            w_mask = (out < outs)[:, None] & (column < size)[None, :]
            x_mask = (row < rows)[None, :] & (column < size)[:, None]
            w_tile = tl.load(w_rows + column[None, :], mask=w_mask, other=0.0)
            x_tile = tl.load(x_rows + column[:, None], mask=x_mask, other=0.0)
            total = tl.dot(w_tile, x_tile, total, input_precision="ieee")
    return total


@jit
def _split_gemm_kernel(
    x: tl.tensor,
    x_scale: tl.tensor,
    w: tl.tensor,
    w_scale: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    tickets: tl.tensor,
    rows: tl.tensor,
    outs: tl.tensor,
    size: tl.tensor,
    x_stride: tl.tensor,
    w_stride: tl.tensor,
    out_stride: tl.tensor,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    ACROSS: tl.constexpr,
    SCALED: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """One tile of ``out`` a program, or one chunk of one (``ACROSS``).

    ``x[rows, size]``, ``w[outs, size]`` by row stride or as tensor descriptors; ``out[rows, outs]``;
    ``x_scale[rows]``, ``w_scale[outs]`` float32 when ``SCALED``; ``partial`` float32
    [tiles, SPLITS, BLOCK_OUT, BLOCK_ROWS] and ``tickets`` int32 [tiles], zero before and after the launch,
    when ``ACROSS``.
    """
    row_tiles = tl.cdiv(rows, BLOCK_ROWS)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    row0 = (tile % row_tiles) * BLOCK_ROWS
    out0 = (tile // row_tiles) * BLOCK_OUT
    total = _chunk_product(
        x,
        w,
        row0,
        out0,
        rows,
        outs,
        split * CHUNK,
        size,
        x_stride,
        w_stride,
        CHUNK,
        DESCRIPTOR,
        BLOCK_OUT,
        BLOCK_ROWS,
        BLOCK_K,
    )
    last = True
    if ACROSS:
        inner = tl.arange(0, BLOCK_OUT)[:, None] * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[None, :]
        block: tl.constexpr = BLOCK_OUT * BLOCK_ROWS
        first = partial + tile.to(tl.int64) * (SPLITS * block) + inner
        tl.store(first + split * block, total, cache_modifier=".cg")
        tl.debug_barrier()
        last = tl.atomic_add(tickets + tile, 1, sem="acq_rel") == SPLITS - 1
        if last:
            total = tl.load(first, cache_modifier=".cg")
            for i in range(1, SPLITS):
                total += tl.load(first + i * block, cache_modifier=".cg")
            tl.store(tickets + tile, 0)
    else:
        for i in range(1, SPLITS):
            total += _chunk_product(
                x,
                w,
                row0,
                out0,
                rows,
                outs,
                i * CHUNK,
                size,
                x_stride,
                w_stride,
                CHUNK,
                DESCRIPTOR,
                BLOCK_OUT,
                BLOCK_ROWS,
                BLOCK_K,
            )
    if last:
        row = row0 + tl.arange(0, BLOCK_ROWS)
        column = out0 + tl.arange(0, BLOCK_OUT)
        if SCALED:
            token_scale = tl.load(x_scale + row, mask=row < rows, other=0.0)
            channel_scale = tl.load(w_scale + column, mask=column < outs, other=0.0)
            total = total * token_scale[None, :] * channel_scale[:, None]
        target = out + row.to(tl.int64)[None, :] * out_stride + column[:, None]
        mask = (row < rows)[None, :] & (column < outs)[:, None]
        tl.store(target, total.to(out.dtype.element_ty), mask=mask)


def _aligned(matrix: torch.Tensor) -> bool:
    """Whether the copy engine can fetch tiles of ``matrix``: 16-byte rows from a 16-byte address."""
    row_bytes = matrix.stride(0) * matrix.element_size()
    return matrix.data_ptr() % 16 == 0 and row_bytes % 16 == 0 and matrix.stride(1) == 1


class SplitGemm:
    """Fixed-split products on one device and one stream, with the workspace that they share.

    The workspace is reused by consecutive launches: two streams need two objects.
    """

    def __init__(self, device: torch.device, *, workspace_bytes: int = 32 << 20, max_tiles: int = 4096) -> None:
        self.partial = torch.empty(workspace_bytes // 4, dtype=torch.float32, device=device)
        self.tickets = torch.zeros(max_tiles, dtype=torch.int32, device=device)

    def linear(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """``x[T, in] @ w[out, in].T`` in ``x.dtype``."""
        return self._launch(x, None, w, None, x.dtype)

    def linear_fp8(
        self,
        x_fp8: torch.Tensor,
        x_scale: torch.Tensor,
        w_fp8: torch.Tensor,
        w_scale: torch.Tensor,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        """W8A8 product, as :func:`flashrec.kernels.linear.linear_fp8`."""
        return self._launch(x_fp8, x_scale, w_fp8, w_scale, out_dtype)

    def _launch(
        self,
        x: torch.Tensor,
        x_scale: torch.Tensor | None,
        w: torch.Tensor,
        w_scale: torch.Tensor | None,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        plan = plan_gemm(x.shape[0], w.shape[0], w.shape[1], w.element_size())
        return self.run(plan, x, x_scale, w, w_scale, out_dtype)

    def run(
        self,
        plan: GemmPlan,
        x: torch.Tensor,
        x_scale: torch.Tensor | None,
        w: torch.Tensor,
        w_scale: torch.Tensor | None,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        """The product under a given plan. ``ValueError`` if the plan's partial sums exceed the workspace."""
        rows, size = x.shape
        outs = w.shape[0]
        out = torch.empty(rows, outs, dtype=out_dtype, device=x.device)
        tiles = ceil_div(outs, plan.block_out) * ceil_div(rows, plan.block_rows)
        needed = tiles * plan.splits * plan.block_out * plan.block_rows
        if plan.across_programs and (needed > self.partial.numel() or tiles > self.tickets.numel()):
            raise ValueError(f"split GEMM: {tiles} tiles need {4 * needed} bytes of workspace; enlarge it")
        chunk = ceil_div(ceil_div(size, plan.splits), plan.block_k) * plan.block_k
        described = _aligned(x) and _aligned(w)
        if rows:
            _split_gemm_kernel[(tiles, plan.splits if plan.across_programs else 1)](
                descriptor(x, [plan.block_rows, plan.block_k]) if described else x,
                self.partial if x_scale is None else x_scale,
                descriptor(w, [plan.block_out, plan.block_k]) if described else w,
                self.partial if w_scale is None else w_scale,
                out,
                self.partial,
                self.tickets,
                rows,
                outs,
                size,
                x.stride(0),
                w.stride(0),
                out.stride(0),
                SPLITS=plan.splits,
                CHUNK=chunk,
                DESCRIPTOR=described,
                ACROSS=plan.across_programs,
                SCALED=x_scale is not None,
                BLOCK_OUT=plan.block_out,
                BLOCK_ROWS=plan.block_rows,
                BLOCK_K=plan.block_k,
                num_warps=plan.warps,
                num_stages=plan.stages,
            )
        return out


def linear_triton(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """:func:`flashrec.kernels.linear.linear` with a workspace of its own, for a single call."""
    return SplitGemm(x.device).linear(x, w)


def linear_fp8_triton(
    x_fp8: torch.Tensor,
    x_scale: torch.Tensor,
    w_fp8: torch.Tensor,
    w_scale: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """:func:`flashrec.kernels.linear.linear_fp8` with a workspace of its own, for a single call."""
    return SplitGemm(x_fp8.device).linear_fp8(x_fp8, x_scale, w_fp8, w_scale, out_dtype)
