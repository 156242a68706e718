"""Shared-prefix decode attention on the device: a context kernel by request tile, then a merge by row.

The context is cut into splits of a fixed number of tokens, each with its own softmax state from scratch, and
states are merged in order. With few tiles the splits run in parallel and the second kernel merges them; with
many, the first kernel merges as it goes. Both perform the same operations in the same order, so which one
runs, a matter of how many tiles the bucket has, leaves a row's bits alone.
"""

from __future__ import annotations

import torch

from flashrec.kernels._softmax import LOG2E, attend_range, cache_arguments, merge_states
from flashrec.kernels._triton import ceil_div, jit, next_power_of_2, tl
from flashrec.kernels.paged_attention import KV_TILE
from flashrec.kernels.quantize import ABSMAX_FLOOR, empty_codes
from flashrec.kernels.tiles import RowTiles

SPLIT_TOKENS = 512
"""Tokens of one context split: fixed, so that a row's reduction order depends on its context alone."""
FULL_CHIP = 132
"""Tiles x K/V heads from which the context kernel fills the chip without parallel splits.

H200, 2026-11-29, us with / without: 1 x 50 rows over 2,465 tokens 16 / 43; 8 x 50: 51 / 53; 32 x 50: 171 / 132."""
CONTEXT_WARPS = 4
CONTEXT_STAGES = 3
PREFETCH = 4
"""States, or a beam's own tokens, whose loads the merge kernel has in flight together."""


@jit
def _split_state(
    queries: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    pages: tl.tensor,
    kv_head: tl.tensor,
    begin: tl.tensor,
    length: tl.tensor,
    limits: tl.tensor,
    log2_scale: tl.tensor,
    slot_stride: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    KV_TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
) -> tl.tensor:
    """Device: softmax state, from scratch, of the tokens ``begin .. min(begin + SPLIT, length) - 1``."""
    size: tl.constexpr = queries.shape[0]
    peak = tl.full((size,), float("-inf"), tl.float32)
    total = tl.zeros((size,), tl.float32)
    weighted = tl.zeros((size, BLOCK_D), tl.float32)
    end = tl.minimum(begin + SPLIT, length)
    whole = begin + (end - begin) // KV_TILE * KV_TILE
    peak, total, weighted = attend_range(
        queries,
        peak,
        total,
        weighted,
        k_cache,
        v_cache,
        pages,
        kv_head,
        begin,
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
    return peak, total, weighted


@jit
def _context_kernel(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    page_table: tl.tensor,
    ctx_len: tl.tensor,
    tile_request: tl.tensor,
    tile_row0: tl.tensor,
    tile_rows: tl.tensor,
    partial: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    log2_scale: tl.tensor,
    page_stride: tl.tensor,
    slot_stride: tl.tensor,
    num_rows: tl.tensor,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KV_TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    ACROSS: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
) -> None:
    """K/V head x row tile x split (``ACROSS``) a program, else all splits of a tile.

    ``partial`` float32 [splits, rows, hq, HEAD_DIM], ``peaks`` and ``totals`` float32 [splits, rows, hq].
    """
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    split = tl.program_id(2)
    group: tl.constexpr = Q_HEADS // KV_HEADS
    live = tl.load(tile_rows + tile)
    request = tl.load(tile_request + tile)
    row0 = tl.load(tile_row0 + tile)
    length = tl.load(ctx_len + request)
    if (live > 0) & (split * SPLIT < length):
        m = tl.arange(0, TILE_ROWS * GROUP_BLOCK)
        member = m % GROUP_BLOCK
        inside = (m // GROUP_BLOCK < live) & (member < group)
        head = (row0 + m // GROUP_BLOCK).to(tl.int64) * Q_HEADS + kv_head * group + member
        lane = tl.arange(0, BLOCK_D)
        mask = inside[:, None] & (lane < HEAD_DIM)[None, :]
        queries = tl.load(q + head[:, None] * HEAD_DIM + lane[None, :], mask=mask, other=0.0)
        pages = page_table + request.to(tl.int64) * page_stride
        limits = tl.zeros_like(m) + length
        peak, total, weighted = _split_state(
            queries,
            k_cache,
            v_cache,
            pages,
            kv_head,
            split * SPLIT,
            length,
            limits,
            log2_scale,
            slot_stride,
            PAGE_SIZE,
            KV_TILE,
            HEAD_DIM,
            BLOCK_D,
            SPLIT,
            DESCRIPTOR,
        )
        if not ACROSS:
            for begin in range(SPLIT, length, SPLIT):
                other_peak, other_total, other_weighted = _split_state(
                    queries,
                    k_cache,
                    v_cache,
                    pages,
                    kv_head,
                    begin,
                    length,
                    limits,
                    log2_scale,
                    slot_stride,
                    PAGE_SIZE,
                    KV_TILE,
                    HEAD_DIM,
                    BLOCK_D,
                    SPLIT,
                    DESCRIPTOR,
                )
                peak, total, weighted = merge_states(peak, total, weighted, other_peak, other_total, other_weighted)
        target = split.to(tl.int64) * num_rows * Q_HEADS + head
        tl.store(partial + target[:, None] * HEAD_DIM + lane[None, :], weighted, mask=mask)
        tl.store(peaks + target, peak, mask=inside)
        tl.store(totals + target, total, mask=inside)


@jit
def _merge_kernel(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    ctx_len: tl.tensor,
    tile_request: tl.tensor,
    tile_row0: tl.tensor,
    tile_rows: tl.tensor,
    partial: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    ancestors: tl.tensor,
    out: tl.tensor,
    scale: tl.tensor,
    beam_base: tl.tensor,
    beam_capacity: tl.tensor,
    steps: tl.tensor,
    ancestor_stride: tl.tensor,
    log2_scale: tl.tensor,
    v_scale: tl.tensor,
    slot_stride: tl.tensor,
    num_rows: tl.tensor,
    absmax_floor: tl.tensor,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    ACROSS: tl.constexpr,
    QUANTIZE: tl.constexpr,
    PREFETCH: tl.constexpr,
) -> None:
    """One row a program: merges its context states in order, adds its beam's own tokens, and divides.

    ``out[rows, hq, HEAD_DIM]``, or its FP8 codes with ``scale[rows]`` when ``QUANTIZE``.
    """
    tile = tl.program_id(0)
    within = tl.program_id(1)
    if within < tl.load(tile_rows + tile):
        row = (tl.load(tile_row0 + tile) + within).to(tl.int64)
        head = tl.arange(0, HEAD_BLOCK)
        lane = tl.arange(0, BLOCK_D)
        live = head < Q_HEADS
        mask = live[:, None] & (lane < HEAD_DIM)[None, :]
        index = row * Q_HEADS + head
        inner = head[:, None] * HEAD_DIM + lane[None, :]
        peak = tl.load(peaks + index, mask=live, other=0.0)
        total = tl.load(totals + index, mask=live, other=1.0)
        weighted = tl.load(partial + row * (Q_HEADS * HEAD_DIM) + inner, mask=mask, other=0.0)
        if ACROSS:
            length = tl.load(ctx_len + tl.load(tile_request + tile))
            splits = tl.cdiv(length, SPLIT)
            for first in range(1, splits, PREFETCH):
                for ahead in tl.static_range(PREFETCH):
                    present = first + ahead < splits
                    skip = tl.cast(first + ahead, tl.int64) * num_rows * Q_HEADS
                    other_peak = tl.load(peaks + skip + index, mask=live & present, other=float("-inf"))
                    other_total = tl.load(totals + skip + index, mask=live & present, other=0.0)
                    source = partial + (skip + row * Q_HEADS) * HEAD_DIM + inner
                    other_weighted = tl.load(source, mask=mask & present, other=0.0)
                    peak, total, weighted = merge_states(peak, total, weighted, other_peak, other_total, other_weighted)
        weighted *= v_scale
        query = tl.load(q + row * (Q_HEADS * HEAD_DIM) + inner, mask=mask, other=0.0).to(tl.float32)
        kv_inner = (head // (Q_HEADS // KV_HEADS))[:, None] * HEAD_DIM + lane[None, :]
        for first in range(0, steps, PREFETCH):
            for ahead in tl.static_range(PREFETCH):
                step = first + ahead
                ancestor = tl.load(ancestors + step * ancestor_stride + row, mask=step < steps, other=0)
                slot = beam_base + tl.cast(step, tl.int64) * beam_capacity + ancestor
                source = slot * slot_stride + kv_inner
                own = mask & (step < steps)
                k = tl.load(k_cache + source, mask=own, other=0.0).to(tl.float32)
                v = tl.load(v_cache + source, mask=own, other=0.0).to(tl.float32) * v_scale
                logit = tl.where(step < steps, tl.sum(query * k, axis=1) * log2_scale, float("-inf"))
                one = tl.where(step < steps, tl.full(logit.shape, 1.0, tl.float32), 0.0)
                peak, total, weighted = merge_states(peak, total, weighted, logit, one, v)
        result = (weighted / total[:, None]).to(q.dtype.element_ty)
        target = out + row * (Q_HEADS * HEAD_DIM) + inner
        if QUANTIZE:
            wide = tl.where(mask, result.to(tl.float32), 0.0)
            absmax = tl.maximum(tl.max(tl.max(tl.abs(wide), axis=1), axis=0), absmax_floor)
            row_scale = tl.div_rn(absmax, 448.0)
            scaled = wide * tl.div_rn(1.0, row_scale)
            clamped = tl.minimum(tl.maximum(scaled, -448.0), 448.0)
            tl.store(target, clamped.to(out.dtype.element_ty), mask=mask)
            tl.store(scale + row, row_scale)
        else:
            tl.store(target, result, mask=mask)


def _launch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    ctx_len: torch.Tensor,
    tiles: RowTiles,
    tile_rows: int,
    beam_base: int,
    beam_capacity: int,
    step: int,
    ancestors: torch.Tensor,
    scale: float,
    k_scale: float,
    v_scale: float,
    out: torch.Tensor,
    out_scale: torch.Tensor | None,
    across: bool | None,
) -> None:
    rows, q_heads, head_dim = q.shape
    kv_heads = k_cache.shape[1]
    num_tiles = tiles.rows.shape[0]
    if rows == 0 or num_tiles == 0:
        return
    if across is None:
        across = num_tiles * kv_heads < FULL_CHIP
    splits = ceil_div(page_table.shape[1] * page_size, SPLIT_TOKENS) if across else 1
    partial = torch.empty(splits, rows, q_heads, head_dim, dtype=torch.float32, device=q.device)
    peaks, totals = torch.empty(2, splits, rows, q_heads, dtype=torch.float32, device=q.device)
    quantised = k_cache.element_size() == 1
    log2_scale = scale * LOG2E * (k_scale if quantised else 1.0)
    value_scale = v_scale if quantised else 1.0
    block_d = max(16, next_power_of_2(head_dim))
    group_block = next_power_of_2(q_heads // kv_heads)
    k_tiles, v_tiles, descriptor = cache_arguments(k_cache, v_cache, page_size, KV_TILE)
    _context_kernel[(kv_heads, num_tiles, splits)](
        q,
        k_tiles,
        v_tiles,
        page_table,
        ctx_len,
        *tiles,
        partial,
        peaks,
        totals,
        log2_scale,
        page_table.stride(0),
        k_cache.stride(0),
        rows,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        GROUP_BLOCK=group_block,
        TILE_ROWS=tile_rows,
        PAGE_SIZE=page_size,
        KV_TILE=KV_TILE,
        SPLIT=SPLIT_TOKENS,
        ACROSS=across,
        DESCRIPTOR=descriptor,
        num_warps=CONTEXT_WARPS,
        num_stages=CONTEXT_STAGES,
    )
    _merge_kernel[(num_tiles, tile_rows)](
        q,
        k_cache,
        v_cache,
        ctx_len,
        *tiles,
        partial,
        peaks,
        totals,
        ancestors,
        out,
        out if out_scale is None else out_scale,
        beam_base,
        beam_capacity,
        step,
        ancestors.stride(0),
        log2_scale,
        value_scale,
        k_cache.stride(0),
        rows,
        ABSMAX_FLOOR,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        HEAD_BLOCK=next_power_of_2(q_heads),
        SPLIT=SPLIT_TOKENS,
        ACROSS=across,
        QUANTIZE=out_scale is not None,
        PREFETCH=PREFETCH,
        num_warps=4,
    )


def shared_prefix_attention_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    ctx_len: torch.Tensor,
    tiles: RowTiles,
    tile_rows: int,
    beam_base: int,
    beam_capacity: int,
    step: int,
    ancestors: torch.Tensor,
    scale: float,
    k_scale: float,
    v_scale: float,
    *,
    across: bool | None = None,
) -> torch.Tensor:
    """:func:`flashrec.kernels.decode_attention.shared_prefix_attention`; ``q`` contiguous.

    ``across`` forces or forbids parallel splits, for the tests that show that both give the same bits.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _launch(
        q,
        k_cache,
        v_cache,
        page_table,
        page_size,
        ctx_len,
        tiles,
        tile_rows,
        beam_base,
        beam_capacity,
        step,
        ancestors,
        scale,
        k_scale,
        v_scale,
        out,
        None,
        across,
    )
    return out


def shared_prefix_attention_quant_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    ctx_len: torch.Tensor,
    tiles: RowTiles,
    tile_rows: int,
    beam_base: int,
    beam_capacity: int,
    step: int,
    ancestors: torch.Tensor,
    scale: float,
    k_scale: float,
    v_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`flashrec.kernels.decode_attention.shared_prefix_attention_quant`; ``q`` contiguous."""
    codes, out_scale = empty_codes(q, q.shape[1] * q.shape[2])
    _launch(
        q,
        k_cache,
        v_cache,
        page_table,
        page_size,
        ctx_len,
        tiles,
        tile_rows,
        beam_base,
        beam_capacity,
        step,
        ancestors,
        scale,
        k_scale,
        v_scale,
        codes,
        out_scale,
        None,
    )
    return codes, out_scale
