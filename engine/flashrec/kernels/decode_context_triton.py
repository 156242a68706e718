"""The context part of decode attention: pieces of a request's context, each by a tile of its query rows."""

from __future__ import annotations

import functools

from flashrec.kernels._softmax import attend_range, merge_states
from flashrec.kernels._triton import after_previous, jit, tl


@jit
def _split_state(
    queries: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    pages: tl.tensor,
    kv_head: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
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
    return attend_range(
        queries,
        tl.full((size,), float("-inf"), tl.float32),
        tl.zeros((size,), tl.float32),
        tl.zeros((size, BLOCK_D), tl.float32),
        k_cache,
        v_cache,
        pages,
        kv_head,
        begin,
        begin + (end - begin) // KV_TILE * KV_TILE,
        end,
        tl.full((size,), end, tl.int32),
        log2_scale,
        slot_stride,
        PAGE_SIZE,
        KV_TILE,
        HEAD_DIM,
        BLOCK_D,
        DESCRIPTOR,
    )


@functools.partial(jit, varying=("num_tiles",))
def context_kernel(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    page_table: tl.tensor,
    states: tl.tensor,
    pieces: tl.tensor,
    partial: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    log2_scale: tl.tensor,
    page_stride: tl.tensor,
    slot_stride: tl.tensor,
    num_tiles: tl.tensor,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KV_TILE: tl.constexpr,
    FIELDS: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """A K/V head a program: every so many-th of the ``pieces`` of :class:`flashrec.kernels.decode_work.DecodeWork`.

    ``partial`` float32 [states, KV_HEADS, TILE_ROWS * GROUP_BLOCK, BLOCK_D], ``peaks`` and ``totals`` the same without
    its last axis. They have room for all rows of a tile, live or not: a mask would take registers that are scarce.
    """
    count = tl.load(states + num_tiles)
    after_previous(OVERLAP)
    kv_head = tl.program_id(0)
    group: tl.constexpr = Q_HEADS // KV_HEADS
    size: tl.constexpr = TILE_ROWS * GROUP_BLOCK
    m = tl.arange(0, size)
    within = m // GROUP_BLOCK
    member = m % GROUP_BLOCK
    lane = tl.arange(0, BLOCK_D)
    for number in range(tl.program_id(1), count, tl.num_programs(1)):
        piece = pieces + number * FIELDS
        request = tl.load(piece)
        row0 = tl.load(piece + 1)
        live = tl.load(piece + 2)
        begin = tl.load(piece + 3)
        end = tl.load(piece + 4)
        split = tl.load(piece + 5)
        state = tl.load(piece + 6)
        inside = (within < live) & (member < group)
        mask = inside[:, None] & (lane < HEAD_DIM)[None, :]
        head = (row0 + within).to(tl.int64) * Q_HEADS + kv_head * group + member
        queries = tl.load(q + head[:, None] * HEAD_DIM + lane[None, :], mask=mask, other=0.0)
        pages = page_table + request.to(tl.int64) * page_stride
        # Merged with these a state keeps its bits: minus zero plus a zero is that zero, whatever its sign.
        peak = tl.full((size,), float("-inf"), tl.float32)
        total = tl.zeros((size,), tl.float32)
        weighted = tl.full((size, BLOCK_D), -0.0, tl.float32)
        for start in range(begin, end, split):
            other_peak, other_total, other_weighted = _split_state(
                queries,
                k_cache,
                v_cache,
                pages,
                kv_head,
                start,
                tl.minimum(start + split, end),
                log2_scale,
                slot_stride,
                PAGE_SIZE,
                KV_TILE,
                HEAD_DIM,
                BLOCK_D,
                DESCRIPTOR,
            )
            peak, total, weighted = merge_states(peak, total, weighted, other_peak, other_total, other_weighted)
        target = (state.to(tl.int64) * KV_HEADS + kv_head) * size + m
        tl.store(partial + target[:, None] * BLOCK_D + lane[None, :], weighted)
        tl.store(peaks + target, peak)
        tl.store(totals + target, total)
