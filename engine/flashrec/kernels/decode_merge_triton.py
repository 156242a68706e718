"""The end of decode attention, a row a program: context states in order, then the beam's own tokens."""

from __future__ import annotations

from flashrec.kernels._softmax import merge_states
from flashrec.kernels._triton import after_previous, jit, tl
from flashrec.kernels.quantize import codes_fp8, row_scale_fp8


@jit
def merge_kernel(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    tile_row0: tl.tensor,
    tile_rows: tl.tensor,
    states: tl.tensor,
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
    absmax_floor: tl.tensor,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    QUANTIZE: tl.constexpr,
    PREFETCH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One row a program: merges its tile's context states in order, adds its beam's own tokens, and divides.

    ``out[rows, hq, HEAD_DIM]``, or its FP8 codes with ``scale[rows]`` when ``QUANTIZE``.
    """
    after_previous(OVERLAP)
    tile = tl.program_id(0)
    within = tl.program_id(1)
    if within < tl.load(tile_rows + tile):
        row = (tl.load(tile_row0 + tile) + within).to(tl.int64)
        head = tl.arange(0, HEAD_BLOCK)
        lane = tl.arange(0, BLOCK_D)
        live = head < Q_HEADS
        mask = live[:, None] & (lane < HEAD_DIM)[None, :]
        inner = head[:, None] * HEAD_DIM + lane[None, :]
        first_state = tl.load(states + tile)
        end_state = tl.load(states + tile + 1)
        place = (tl.cast(first_state, tl.int64) * TILE_ROWS + within) * Q_HEADS
        peak = tl.load(peaks + place + head, mask=live, other=0.0)
        total = tl.load(totals + place + head, mask=live, other=1.0)
        weighted = tl.load(partial + place * HEAD_DIM + inner, mask=mask, other=0.0)
        for first in range(first_state + 1, end_state, PREFETCH):
            for ahead in tl.static_range(PREFETCH):
                present = first + ahead < end_state
                place = (tl.cast(first + ahead, tl.int64) * TILE_ROWS + within) * Q_HEADS
                other_peak = tl.load(peaks + place + head, mask=live & present, other=float("-inf"))
                other_total = tl.load(totals + place + head, mask=live & present, other=0.0)
                other_weighted = tl.load(partial + place * HEAD_DIM + inner, mask=mask & present, other=0.0)
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
            row_scale = row_scale_fp8(tl.max(tl.max(tl.abs(wide), axis=1), axis=0), absmax_floor)
            tl.store(target, codes_fp8(wide, row_scale, out), mask=mask)
            tl.store(scale + row, row_scale)
        else:
            tl.store(target, result, mask=mask)
