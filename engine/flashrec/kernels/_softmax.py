"""Device functions of attention: one K/V tile of an online softmax, and the merge of two states.

A state is (maximum, total, weighted) with the maximum in units of log2. Multiplications that an addition
follows are written as ``fma``: whether a compiler fuses them would otherwise differ between two kernels, or
between a masked and an unmasked tile, and a row's bits with it.
"""

from __future__ import annotations

from flashrec.kernels._triton import jit, tl

LOG2E = 1.4426950408889634


@jit
def attend_tile(
    q: tl.tensor,
    maximum: tl.tensor,
    total: tl.tensor,
    weighted: tl.tensor,
    k_head: tl.tensor,
    v_head: tl.tensor,
    pages: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    limits: tl.tensor,
    log2_scale: tl.tensor,
    slot_stride: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    KV_TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Device: folds tokens ``start .. start + KV_TILE - 1`` into the state of queries ``q[M, BLOCK_D]``.

    ``k_head`` and ``v_head`` point at the K/V head in slot 0. Unmasked, all tokens exist and are seen;
    masked, those before ``end`` exist and row ``m`` sees those before ``limits[m]``.
    """
    position = start + tl.arange(0, KV_TILE)
    lane = tl.arange(0, BLOCK_D)
    valid = position < end
    if MASKED:
        page = tl.load(pages + position // PAGE_SIZE, mask=valid, other=0)
    else:
        page = tl.load(pages + position // PAGE_SIZE)
    slots = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
    k_tile = k_head + slots[None, :] * slot_stride + lane[:, None]
    v_tile = v_head + slots[:, None] * slot_stride + lane[None, :]
    if MASKED or HEAD_DIM != BLOCK_D:
        k = tl.load(k_tile, mask=valid[None, :] & (lane < HEAD_DIM)[:, None], other=0.0)
        v = tl.load(v_tile, mask=valid[:, None] & (lane < HEAD_DIM)[None, :], other=0.0)
    else:
        k = tl.load(k_tile)
        v = tl.load(v_tile)
    logits = tl.dot(q, k.to(q.dtype), input_precision="ieee")
    if MASKED:
        logits = tl.where(position[None, :] < limits[:, None], logits, float("-inf"))
    peak = tl.maximum(maximum, tl.max(logits, axis=1) * log2_scale)
    anchor = tl.where(peak == float("-inf"), 0.0, peak)
    wide_scale = tl.full(logits.shape, log2_scale, tl.float32)
    weights = tl.exp2(tl.fma(logits, wide_scale, tl.zeros_like(logits) - anchor[:, None]))
    kept = tl.exp2(maximum - anchor)
    total = tl.fma(total, kept, tl.sum(weights, axis=1))
    weighted = tl.dot(weights.to(q.dtype), v.to(q.dtype), weighted * kept[:, None], input_precision="ieee")
    return peak, total, weighted


@jit
def merge_states(
    maximum: tl.tensor,
    total: tl.tensor,
    weighted: tl.tensor,
    other_maximum: tl.tensor,
    other_total: tl.tensor,
    other_weighted: tl.tensor,
) -> tl.tensor:
    """Device: the state of both sets of tokens, neither empty in any row: [M], [M], [M, D]."""
    peak = tl.maximum(maximum, other_maximum)
    kept = tl.exp2(maximum - peak)
    added = tl.exp2(other_maximum - peak)
    total = tl.fma(total, kept, other_total * added)
    kept_wide = kept[:, None] + tl.zeros_like(weighted)
    weighted = tl.fma(weighted, kept_wide, other_weighted * added[:, None])
    return peak, total, weighted
