"""The context part of decode attention: a tile of query rows against its request's pages, in fixed splits."""

from __future__ import annotations

import functools

from flashrec.kernels._softmax import attend_range, merge_states
from flashrec.kernels._triton import after_previous, jit, tl


@jit
def split_of(length: tl.tensor, SPLIT: tl.constexpr) -> tl.tensor:
    """Device: tokens of a split of a context of ``length``: see ``SPLIT_TOKENS``."""
    return tl.where(length <= SPLIT, SPLIT // 4, tl.where(length <= 4 * SPLIT, SPLIT // 2, SPLIT))


@jit
def _split_state(
    queries: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    pages: tl.tensor,
    kv_head: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    limits: tl.tensor,
    log2_scale: tl.tensor,
    slot_stride: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    KV_TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
) -> tl.tensor:
    """Device: softmax state, from scratch, of the tokens ``begin .. end - 1``."""
    size: tl.constexpr = queries.shape[0]
    peak = tl.full((size,), float("-inf"), tl.float32)
    total = tl.zeros((size,), tl.float32)
    weighted = tl.zeros((size, BLOCK_D), tl.float32)
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
def _attend(
    tile: tl.tensor,
    split: tl.tensor,
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
    """Device: one tile's state of one split (``ACROSS``), else of all, for a K/V head; nothing where there is none."""
    kv_head = tl.program_id(0)
    group: tl.constexpr = Q_HEADS // KV_HEADS
    live = tl.load(tile_rows + tile)
    request = tl.load(tile_request + tile)
    row0 = tl.load(tile_row0 + tile)
    length = tl.load(ctx_len + request)
    split_tokens = split_of(length, SPLIT)
    if (live > 0) & (split * split_tokens < length):
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
            split * split_tokens,
            tl.minimum((split + 1) * split_tokens, length),
            limits,
            log2_scale,
            slot_stride,
            PAGE_SIZE,
            KV_TILE,
            HEAD_DIM,
            BLOCK_D,
            DESCRIPTOR,
        )
        if not ACROSS:
            for begin in range(split_tokens, length, split_tokens):
                other_peak, other_total, other_weighted = _split_state(
                    queries,
                    k_cache,
                    v_cache,
                    pages,
                    kv_head,
                    begin,
                    tl.minimum(begin + split_tokens, length),
                    limits,
                    log2_scale,
                    slot_stride,
                    PAGE_SIZE,
                    KV_TILE,
                    HEAD_DIM,
                    BLOCK_D,
                    DESCRIPTOR,
                )
                peak, total, weighted = merge_states(peak, total, weighted, other_peak, other_total, other_weighted)
        target = split.to(tl.int64) * num_rows * Q_HEADS + head
        tl.store(partial + target[:, None] * HEAD_DIM + lane[None, :], weighted, mask=mask)
        tl.store(peaks + target, peak, mask=inside)
        tl.store(totals + target, total, mask=inside)


@functools.partial(jit, varying=("num_requests", "num_tiles"))
def context_kernel(
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
    num_requests: tl.tensor,
    num_tiles: tl.tensor,
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
    REQUEST_BLOCK: tl.constexpr,
    TILE_BLOCK: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """A K/V head a program: a row tile with all its splits, or (``ACROSS``) every so many-th pair of tile and split.

    ``partial`` float32 [splits, rows, hq, HEAD_DIM], ``peaks`` and ``totals`` float32 [splits, rows, hq].
    """
    after_previous(OVERLAP)
    if ACROSS:
        request = tl.arange(0, REQUEST_BLOCK)
        lengths = tl.load(ctx_len + request, mask=request < num_requests, other=0)
        tile = tl.arange(0, TILE_BLOCK)
        live = tl.load(tile_rows + tile, mask=tile < num_tiles, other=0) > 0
        tiles = tl.max(tl.where(live, tile + 1, 0), axis=0)
        splits = tl.max(tl.cdiv(lengths, split_of(lengths, SPLIT)), axis=0)
        for item in range(tl.program_id(1), tiles * splits, tl.num_programs(1)):
            _attend(
                item % tiles,
                item // tiles,
                q,
                k_cache,
                v_cache,
                page_table,
                ctx_len,
                tile_request,
                tile_row0,
                tile_rows,
                partial,
                peaks,
                totals,
                log2_scale,
                page_stride,
                slot_stride,
                num_rows,
                Q_HEADS,
                KV_HEADS,
                HEAD_DIM,
                BLOCK_D,
                GROUP_BLOCK,
                TILE_ROWS,
                PAGE_SIZE,
                KV_TILE,
                SPLIT,
                ACROSS,
                DESCRIPTOR,
            )
    else:
        _attend(
            tl.program_id(1),
            tl.program_id(2),
            q,
            k_cache,
            v_cache,
            page_table,
            ctx_len,
            tile_request,
            tile_row0,
            tile_rows,
            partial,
            peaks,
            totals,
            log2_scale,
            page_stride,
            slot_stride,
            num_rows,
            Q_HEADS,
            KV_HEADS,
            HEAD_DIM,
            BLOCK_D,
            GROUP_BLOCK,
            TILE_ROWS,
            PAGE_SIZE,
            KV_TILE,
            SPLIT,
            ACROSS,
            DESCRIPTOR,
        )
