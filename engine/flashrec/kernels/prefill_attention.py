"""Causal attention of a ragged prefill over the paged pool, cache hit or not (SPEC P3, R2)."""

from __future__ import annotations

from functools import partial

import torch

from flashrec.kernels._softmax import LOG2E, attend_range, cache_arguments
from flashrec.kernels._triton import after_previous, jit, next_power_of_2, overlap, tl
from flashrec.kernels.paged_attention import KV_TILE, context_state, gather_rows, scatter_rows, unfold_heads
from flashrec.kernels.tiles import RowTiles

PREFILL_WARPS = 4
PREFILL_STAGES = 3


def paged_prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    kv_len: torch.Tensor,
    positions: torch.Tensor,
    tiles: RowTiles,
    tile_rows: int,
    scale: float,
    k_scale: float,
    v_scale: float,
) -> torch.Tensor:
    """Causal attention of ``q[T, hq, d]``, whose K and V already stand in the pool.

    Row ``t`` sees the pool tokens of its request at positions ``<= positions[t]`` (int [T], counted from
    the request's first token, cached prefix included) and ``< kv_len[request]``. Rows of a request
    ascend. Other arguments as in :func:`flashrec.kernels.decode_attention.shared_prefix_attention`. Returns
    [T, hq, d] in ``q.dtype``; a row that no tile covers is unspecified.
    """
    num_rows = q.shape[0]
    if len(tiles.rows) == 0:
        return torch.zeros_like(q)
    rows, valid = gather_rows(tiles, tile_rows, num_rows)
    limits = positions.long()[rows] + 1
    state = context_state(
        q[rows], k_cache, v_cache, page_table, page_size, tiles, kv_len, limits, scale, k_scale, v_scale
    )
    out = unfold_heads(state.result(), len(tiles.rows), tile_rows)
    return scatter_rows(out, rows, valid, num_rows).to(q.dtype)


@partial(jit, varying=("page_stride",))
def _prefill_kernel(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    page_table: tl.tensor,
    kv_len: tl.tensor,
    positions: tl.tensor,
    tile_request: tl.tensor,
    tile_row0: tl.tensor,
    tile_rows: tl.tensor,
    out: tl.tensor,
    log2_scale: tl.tensor,
    v_scale: tl.tensor,
    page_stride: tl.tensor,
    slot_stride: tl.tensor,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KV_TILE: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """K/V head x row tile a program; late tiles, which see most, first. ``q``, ``out`` [T, hq, HEAD_DIM]."""
    after_previous(OVERLAP)
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    group: tl.constexpr = Q_HEADS // KV_HEADS
    live = tl.load(tile_rows + tile)
    if live > 0:
        request = tl.load(tile_request + tile)
        m = tl.arange(0, TILE_ROWS * GROUP_BLOCK)
        member = m % GROUP_BLOCK
        in_tile = m // GROUP_BLOCK < live
        row = (tl.load(tile_row0 + tile) + m // GROUP_BLOCK).to(tl.int64)
        head = row * Q_HEADS + kv_head * group + member
        lane = tl.arange(0, BLOCK_D)
        mask = (in_tile & (member < group))[:, None] & (lane < HEAD_DIM)[None, :]
        queries = tl.load(q + head[:, None] * HEAD_DIM + lane[None, :], mask=mask, other=0.0)
        length = tl.load(kv_len + request)
        limits = tl.load(positions + row, mask=in_tile, other=0).to(tl.int32) + 1
        limits = tl.minimum(limits, length)
        end = tl.max(tl.where(in_tile, limits, 0), axis=0)
        whole = tl.min(tl.where(in_tile, limits, length), axis=0) // KV_TILE * KV_TILE
        pages = page_table + request.to(tl.int64) * page_stride
        peak = tl.full((TILE_ROWS * GROUP_BLOCK,), float("-inf"), tl.float32)
        total = tl.zeros((TILE_ROWS * GROUP_BLOCK,), tl.float32)
        weighted = tl.zeros((TILE_ROWS * GROUP_BLOCK, BLOCK_D), tl.float32)
        peak, total, weighted = attend_range(
            queries,
            peak,
            total,
            weighted,
            k_cache,
            v_cache,
            pages,
            kv_head,
            0,
            whole,
            end,
            limits,
            log2_scale,
            slot_stride,
            PAGE_SIZE,
            KV_TILE,
            HEAD_DIM,
            BLOCK_D,
            DESCRIPTOR,
        )
        total = tl.where(total == 0.0, 1.0, total)
        result = weighted / total[:, None] * v_scale
        tl.store(out + head[:, None] * HEAD_DIM + lane[None, :], result.to(out.dtype.element_ty), mask=mask)


def paged_prefill_attention_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    kv_len: torch.Tensor,
    positions: torch.Tensor,
    tiles: RowTiles,
    tile_rows: int,
    scale: float,
    k_scale: float,
    v_scale: float,
) -> torch.Tensor:
    """:func:`paged_prefill_attention` for contiguous ``q``. Both caches share one slot stride."""
    q_heads, head_dim = q.shape[1], q.shape[2]
    kv_heads = k_cache.shape[1]
    num_tiles = tiles.rows.shape[0]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    quantised = k_cache.element_size() == 1
    k_tiles, v_tiles, descriptor = cache_arguments(k_cache, v_cache, page_size, KV_TILE)
    if num_tiles:
        _prefill_kernel[(kv_heads, num_tiles)](
            q,
            k_tiles,
            v_tiles,
            page_table,
            kv_len,
            positions,
            *tiles,
            out,
            scale * LOG2E * (k_scale if quantised else 1.0),
            v_scale if quantised else 1.0,
            page_table.stride(0),
            k_cache.stride(0),
            Q_HEADS=q_heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_D=max(16, next_power_of_2(head_dim)),
            GROUP_BLOCK=next_power_of_2(q_heads // kv_heads),
            TILE_ROWS=tile_rows,
            PAGE_SIZE=page_size,
            KV_TILE=KV_TILE,
            DESCRIPTOR=descriptor,
            num_warps=PREFILL_WARPS,
            num_stages=PREFILL_STAGES,
            **overlap(),
        )
    return out
