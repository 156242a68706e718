"""Device half of the Hopper prefill kernel: a warp group attends with 64 query rows, held in registers.

The products of two tiles of keys run while the weights of the one before are computed. The arithmetic is that of
:mod:`flashrec.kernels._softmax`, tile by tile, so a row gets the same bits from both.
"""

from __future__ import annotations

from flashrec.kernels._gluon import gl, gluon_jit, hopper
from flashrec.kernels.paged_attention import KV_TILE
from flashrec.kernels.tiles import TALL_TILE_M

HALF_M = TALL_TILE_M // 2
"""Query rows times query heads of one warp group."""
M = gl.constexpr(HALF_M)
N = gl.constexpr(KV_TILE)
STAGES = gl.constexpr(4)
"""Tiles of keys and values in shared memory; a power of two, so that remainders are masks. H200, 2026-12-01, 8 x 5,000
with one tile of scores in flight: 1,603 us, with 5 stages 1,690."""


@gluon_jit
def receive(desk: gl.tuple, turn: gl.tensor) -> gl.tensor:
    """The piece of work at hand-over ``turn``, from the fetching warp."""
    items, item_full, item_empty = desk
    slot = turn % 2
    hopper.mbarrier.wait(item_full.index(slot), (turn // 2) & 1)
    item = gl.max(items.index(slot).load(gl.BlockedLayout([1], [32], [4], [0])), axis=0)
    hopper.mbarrier.arrive(item_empty.index(slot), count=1)
    return item


@gluon_jit
def _score(queries: gl.tensor, ring: gl.tuple, step: gl.tensor, zero: gl.tensor) -> gl.tensor:
    """Waits for tile ``step`` of the ring and starts its scores [M, N]."""
    k_ring, _v_ring, full, _empty = ring
    stage = step % STAGES
    hopper.mbarrier.wait(full.index(stage), (step // STAGES) & 1)
    return hopper.warpgroup_mma(queries, k_ring.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon_jit
def _weigh(
    logits: gl.tensor,
    peak: gl.tensor,
    total: gl.tensor,
    log2_scale: gl.tensor,
    layout: gl.constexpr,
    into: gl.constexpr,
) -> gl.tensor:
    """One tile of the online softmax: new peak and total, what remains of the old state, weights [M, N] in bf16."""
    higher = gl.maximum(peak, gl.max(logits, axis=1) * log2_scale)
    anchor = gl.where(higher == float("-inf"), 0.0, higher)
    shift = gl.zeros([M, N], gl.float32, layout) - anchor[:, None]
    weights = gl.exp2(gl.fma(logits, gl.full([M, N], log2_scale, gl.float32, layout), shift))
    kept = gl.exp2(peak - anchor)
    total = gl.fma(total, kept, gl.sum(weights, axis=1))
    return higher, total, kept, gl.convert_layout(weights.to(gl.bfloat16), into)


@gluon_jit
def _add(weights: gl.tensor, values: gl.tensor, weighted: gl.tensor, kept: gl.tensor, rows: gl.constexpr) -> gl.tensor:
    """Starts ``weighted * kept + weights @ values``."""
    return hopper.warpgroup_mma(weights, values, weighted * gl.convert_layout(kept, rows)[:, None], is_async=True)


@gluon_jit
def attend(
    half: gl.constexpr,
    tensors: gl.tuple,
    slot_stride: gl.tensor,
    log2_scale: gl.tensor,
    contexts: gl.tuple,
    work: gl.tuple,
    ring: gl.tuple,
    desk: gl.tuple,
    Q_HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    D: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
) -> None:
    """A warp group: the first or second half of each tile that this program takes."""
    q, out, v_cache, q_smem = tensors
    page_table, page_stride, kv_len, positions = contexts
    tile_request, tile_row0, tile_rows, num_tiles = work
    _k_ring, v_ring, full, empty = ring
    GROUP: gl.constexpr = Q_HEADS // KV_HEADS
    ROWS: gl.constexpr = M // GROUP
    qk: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    pv: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    into: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=pv, k_width=2)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    pv_rows: gl.constexpr = gl.SliceLayout(1, pv)
    m = gl.arange(0, M, layout=gl.SliceLayout(1, wide))
    lane = gl.arange(0, D, layout=gl.SliceLayout(0, wide))
    m_qk = gl.arange(0, M, layout=gl.SliceLayout(1, qk))
    m_pv = gl.arange(0, M, layout=pv_rows)
    lane_pv = gl.arange(0, D, layout=gl.SliceLayout(0, pv))
    zero = gl.zeros([M, N], gl.float32, qk)
    mine_smem = q_smem.index(half)

    step = 0
    turn = 0
    item = receive(desk, turn)
    while item < num_tiles * KV_HEADS:
        kv_head = item % KV_HEADS
        tile = num_tiles - 1 - item // KV_HEADS
        live = gl.load(tile_rows + tile)
        if live > 0:
            request = gl.load(tile_request + tile)
            row0 = gl.load(tile_row0 + tile)
            length = gl.load(kv_len + request)
            last = gl.load(positions + row0 + live - 1) + 1
            tiles = (gl.minimum(last, length) + N - 1) // N
            first = row0 + half * ROWS
            mine = live - half * ROWS
            head = ((first + m // GROUP) * Q_HEADS + kv_head * GROUP + m % GROUP).to(gl.int64)
            mine_smem.store(
                gl.load(q + head[:, None] * D + lane[None, :], mask=(m // GROUP < mine)[:, None], other=0.0)
            )
            queries = mine_smem.load(gl.DotOperandLayout(operand_index=0, parent=qk, k_width=2))

            in_tile = m_qk // GROUP < mine
            limits = gl.load(positions + first + m_qk // GROUP, mask=in_tile, other=-1) + 1
            limits = gl.minimum(limits, length)
            seen = (gl.max(limits, axis=0) + N - 1) // N  # tiles of keys that a row of this half sees
            lowest = gl.min(gl.where(in_tile, limits, length), axis=0)
            whole = gl.minimum(lowest // N, seen)  # tiles that all its rows see to their end
            peak = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, qk))
            total = gl.zeros([M], gl.float32, gl.SliceLayout(1, qk))
            weighted = gl.zeros([M, D], gl.float32, pv)
            if whole > 0:
                logits = hopper.warpgroup_mma_wait(0, deps=[_score(queries, ring, step, zero)])
                # ptxas serialises products that are in flight across a loop's end; hence pairs.
                pairs = (whole - 1) // 2
                for pair in range(pairs):
                    at = step + 2 * pair
                    scores = _score(queries, ring, at + 1, zero)
                    peak, total, kept, p = _weigh(logits, peak, total, log2_scale, qk, into)
                    sums = _add(p, v_ring.index(at % STAGES), weighted, kept, pv_rows)
                    logits = hopper.warpgroup_mma_wait(1, deps=[scores])
                    scores = _score(queries, ring, at + 2, zero)
                    peak, total, kept, p_next = _weigh(logits, peak, total, log2_scale, qk, into)
                    weighted, p = hopper.warpgroup_mma_wait(1, deps=[sums, p])
                    hopper.mbarrier.arrive(empty.index(at % STAGES), count=1)
                    sums = _add(p_next, v_ring.index((at + 1) % STAGES), weighted, kept, pv_rows)
                    logits = hopper.warpgroup_mma_wait(1, deps=[scores])
                    weighted, p_next = hopper.warpgroup_mma_wait(0, deps=[sums, p_next])
                    hopper.mbarrier.arrive(empty.index((at + 1) % STAGES), count=1)
                for i in range(2 * pairs, whole - 1):
                    at = step + i
                    scores = _score(queries, ring, at + 1, zero)
                    peak, total, kept, p = _weigh(logits, peak, total, log2_scale, qk, into)
                    sums = _add(p, v_ring.index(at % STAGES), weighted, kept, pv_rows)
                    logits = hopper.warpgroup_mma_wait(1, deps=[scores])
                    weighted, p = hopper.warpgroup_mma_wait(0, deps=[sums, p])
                    hopper.mbarrier.arrive(empty.index(at % STAGES), count=1)
                at = step + whole - 1
                peak, total, kept, p = _weigh(logits, peak, total, log2_scale, qk, into)
                sums = _add(p, v_ring.index(at % STAGES), weighted, kept, pv_rows)
                weighted = hopper.warpgroup_mma_wait(0, deps=[sums])
                hopper.mbarrier.arrive(empty.index(at % STAGES), count=1)
            for i in range(whole, tiles):
                at = step + i
                stage = at % STAGES
                if i < seen:
                    logits = hopper.warpgroup_mma_wait(0, deps=[_score(queries, ring, at, zero)])
                    position = i * N + gl.arange(0, N, layout=gl.SliceLayout(0, qk))
                    logits = gl.where(position[None, :] < limits[:, None], logits, float("-inf"))
                    peak, total, kept, p = _weigh(logits, peak, total, log2_scale, qk, into)
                    if (i + 1) * N <= length:
                        sums = _add(p, v_ring.index(stage), weighted, kept, pv_rows)
                    else:
                        # What lies in the pool behind the context's end may be NaN, which no weight of zero hides.
                        token = i * N + gl.arange(0, N, layout=gl.SliceLayout(1, wide))
                        there = token < length
                        page = gl.load(page_table + request * page_stride + token // PAGE_SIZE, mask=there, other=0)
                        slot = (page * PAGE_SIZE + token % PAGE_SIZE).to(gl.int64)
                        tail = v_cache + slot[:, None] * slot_stride + kv_head * D + lane[None, :]
                        mine_smem.store(gl.load(tail, mask=there[:, None], other=0.0))
                        hopper.fence_async_shared()
                        sums = _add(p, mine_smem, weighted, kept, pv_rows)
                    weighted = hopper.warpgroup_mma_wait(0, deps=[sums])
                else:
                    hopper.mbarrier.wait(full.index(stage), (at // STAGES) & 1)
                hopper.mbarrier.arrive(empty.index(stage), count=1)
            total = gl.where(total == 0.0, 1.0, total)
            result = (weighted / gl.convert_layout(total, pv_rows)[:, None]).to(gl.bfloat16)
            target = ((first + m_pv // GROUP) * Q_HEADS + kv_head * GROUP + m_pv % GROUP).to(gl.int64)
            gl.store(out + target[:, None] * D + lane_pv[None, :], result, mask=(m_pv // GROUP < mine)[:, None])
            step += tiles
        turn += 1
        item = receive(desk, turn)
