"""The end of decode attention, a row a program: context states in order, then the beam's own tokens."""

from __future__ import annotations

from flashrec.kernels._softmax import merge_states
from flashrec.kernels._triton import after_previous, jit, tl
from flashrec.kernels.quantize import codes_fp8, row_scale_fp8


@jit
def _own_token(
    query: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    chosen: tl.tensor,
    ancestor_stride: tl.tensor,
    step: tl.tensor,
    there: tl.tensor,
    inner: tl.tensor,
    mask: tl.tensor,
    beam_base: tl.tensor,
    beam_capacity: tl.tensor,
    slot_stride: tl.tensor,
    log2_scale: tl.tensor,
    v_scale: tl.tensor,
) -> tl.tensor:
    """Device: the state of the beam's token of ``step``, or of no token where it is not ``there``.

    Its loads go past the first-level cache, since they may be older than the wait for the kernel before.
    """
    ancestor = tl.load(chosen + step * ancestor_stride, mask=there, other=0, cache_modifier=".cg")
    slot = beam_base + tl.cast(step, tl.int64) * beam_capacity + ancestor
    source = slot * slot_stride + inner
    own = mask & there
    k = tl.load(k_cache + source, mask=own, other=0.0, cache_modifier=".cg").to(tl.float32)
    v = tl.load(v_cache + source, mask=own, other=0.0, cache_modifier=".cg").to(tl.float32) * v_scale
    product = tl.sum(query * k, axis=1)
    # Not a plain product: the subtraction that follows would be fused with it where a compiler knows it is there.
    scaled = tl.fma(product, tl.full(product.shape, log2_scale, tl.float32), tl.zeros_like(product))
    logit = tl.where(there, scaled, float("-inf"))
    one = tl.where(there, tl.full(logit.shape, 1.0, tl.float32), 0.0)
    return logit, one, v


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
    GROUP_BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    QUANTIZE: tl.constexpr,
    PREFETCH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One row a program: merges its tile's context states in order, adds its beam's own tokens, and divides.

    ``out[rows, hq, HEAD_DIM]``, or its FP8 codes with ``scale[rows]`` when ``QUANTIZE``.
    """
    tile = tl.program_id(0)
    within = tl.program_id(1)
    alive = within < tl.load(tile_rows + tile)
    row = (tl.load(tile_row0 + tile) + within).to(tl.int64)
    first_state = tl.load(states + tile)
    end_state = tl.load(states + tile + 1)
    head = tl.arange(0, HEAD_BLOCK)
    lane = tl.arange(0, BLOCK_D)
    group: tl.constexpr = Q_HEADS // KV_HEADS
    live = head < Q_HEADS
    mask = live[:, None] & (lane < HEAD_DIM)[None, :]
    inner = head[:, None] * HEAD_DIM + lane[None, :]
    kv_inner = (head // group)[:, None] * HEAD_DIM + lane[None, :]
    chosen = ancestors + row
    # Queries and own tokens were written before the context kernel began, which alone may still run here.
    asked = q + row * (Q_HEADS * HEAD_DIM) + inner
    query = tl.load(asked, mask=mask & alive, other=0.0, cache_modifier=".cg").to(tl.float32)
    first_logit, first_one, first_v = _own_token(
        query,
        k_cache,
        v_cache,
        chosen,
        ancestor_stride,
        0,
        alive & (steps > 0),
        kv_inner,
        mask,
        beam_base,
        beam_capacity,
        slot_stride,
        log2_scale,
        v_scale,
    )
    second_logit, second_one, second_v = _own_token(
        query,
        k_cache,
        v_cache,
        chosen,
        ancestor_stride,
        1,
        alive & (steps > 1),
        kv_inner,
        mask,
        beam_base,
        beam_capacity,
        slot_stride,
        log2_scale,
        v_scale,
    )
    after_previous(OVERLAP)
    if alive:
        in_state = (head // group * TILE_ROWS + within) * GROUP_BLOCK + head % group
        place = tl.cast(first_state, tl.int64) * (KV_HEADS * TILE_ROWS * GROUP_BLOCK) + in_state
        peak = tl.load(peaks + place, mask=live, other=0.0)
        total = tl.load(totals + place, mask=live, other=1.0)
        weighted = tl.load(partial + place[:, None] * BLOCK_D + lane[None, :], mask=mask, other=0.0)
        for first in range(first_state + 1, end_state, PREFETCH):
            for ahead in tl.static_range(PREFETCH):
                present = first + ahead < end_state
                place = tl.cast(first + ahead, tl.int64) * (KV_HEADS * TILE_ROWS * GROUP_BLOCK) + in_state
                other_peak = tl.load(peaks + place, mask=live & present, other=float("-inf"))
                other_total = tl.load(totals + place, mask=live & present, other=0.0)
                other_weighted = tl.load(
                    partial + place[:, None] * BLOCK_D + lane[None, :], mask=mask & present, other=0.0
                )
                peak, total, weighted = merge_states(peak, total, weighted, other_peak, other_total, other_weighted)
        weighted *= v_scale
        peak, total, weighted = merge_states(peak, total, weighted, first_logit, first_one, first_v)
        peak, total, weighted = merge_states(peak, total, weighted, second_logit, second_one, second_v)
        for first in range(2, steps, PREFETCH):
            for ahead in tl.static_range(PREFETCH):
                logit, one, v = _own_token(
                    query,
                    k_cache,
                    v_cache,
                    chosen,
                    ancestor_stride,
                    first + ahead,
                    first + ahead < steps,
                    kv_inner,
                    mask,
                    beam_base,
                    beam_capacity,
                    slot_stride,
                    log2_scale,
                    v_scale,
                )
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
