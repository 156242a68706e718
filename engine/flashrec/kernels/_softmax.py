"""Device functions of attention: one K/V tile of an online softmax, and the merge of two states.

A state is (maximum, total, weighted) with the maximum in units of log2. Multiplications that an addition
follows are written as ``fma``: whether a compiler fuses them would otherwise differ between two kernels, or
between a masked and an unmasked tile, and a row's bits with it.
"""

from __future__ import annotations

import torch

from flashrec.kernels._triton import descriptor, jit, tl

LOG2E = 1.4426950408889634


@jit
def pages_of(
    pages: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    KV_TILE: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
) -> tl.tensor:
    """Device: page numbers of the tile at ``start``: one if a page holds a tile, else one a token."""
    if DESCRIPTOR:
        page = tl.load(pages + start // PAGE_SIZE, mask=start < end, other=0)
    else:
        position = start + tl.arange(0, KV_TILE)
        page = tl.load(pages + position // PAGE_SIZE, mask=position < end, other=0)
    return page


@jit
def attend_tile(
    q: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    weighted: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    page: tl.tensor,
    kv_head: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    limits: tl.tensor,
    log2_scale: tl.tensor,
    slot_stride: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    KV_TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Device: folds tokens ``start .. start + KV_TILE - 1`` into the state of queries ``q[M, BLOCK_D]``.

    ``k_cache`` and ``v_cache`` are pointers, or tensor descriptors with blocks [KV_TILE, BLOCK_D]. Unmasked,
    all tokens exist and are seen; masked, those before ``end`` exist and row ``m`` sees those before
    ``limits[m]``.
    """
    position = start + tl.arange(0, KV_TILE)
    lane = tl.arange(0, BLOCK_D)
    if DESCRIPTOR:
        slot = page * PAGE_SIZE + start % PAGE_SIZE
        k = k_cache.load([slot, kv_head * HEAD_DIM]).T
        v = v_cache.load([slot, kv_head * HEAD_DIM])
        if MASKED:
            v = tl.where((position < end)[:, None], v, tl.zeros_like(v))
    else:
        slots = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
        tile = kv_head * HEAD_DIM + slots[:, None] * slot_stride + lane[None, :]
        if MASKED or HEAD_DIM != BLOCK_D:
            valid = (position < end)[:, None] & (lane < HEAD_DIM)[None, :]
            k = tl.load(k_cache + tile, mask=valid, other=0.0).T
            v = tl.load(v_cache + tile, mask=valid, other=0.0)
        else:
            k = tl.load(k_cache + tile).T
            v = tl.load(v_cache + tile)
    logits = tl.dot(q, k.to(q.dtype), input_precision="ieee")
    if MASKED:
        logits = tl.where(position[None, :] < limits[:, None], logits, float("-inf"))
    higher = tl.maximum(peak, tl.max(logits, axis=1) * log2_scale)
    anchor = tl.where(higher == float("-inf"), 0.0, higher)
    wide_scale = tl.full(logits.shape, log2_scale, tl.float32)
    weights = tl.exp2(tl.fma(logits, wide_scale, tl.zeros_like(logits) - anchor[:, None]))
    kept = tl.exp2(peak - anchor)
    total = tl.fma(total, kept, tl.sum(weights, axis=1))
    weighted = tl.dot(weights.to(q.dtype), v.to(q.dtype), weighted * kept[:, None], input_precision="ieee")
    return higher, total, weighted


@jit
def attend_range(
    q: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    weighted: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    pages: tl.tensor,
    kv_head: tl.tensor,
    begin: tl.tensor,
    whole: tl.tensor,
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
    """Device: folds tokens ``begin .. end - 1`` in tiles; those before ``whole`` need no mask.

    A tile's page numbers are loaded one tile ahead, so that its K and V need not wait for them. Nothing is hoisted out
    of the loops: it would take registers that decode attention lacks, which then spill (Triton 3.6 for sm_90).
    """
    page = pages_of(pages, begin, end, PAGE_SIZE, KV_TILE, DESCRIPTOR)
    for start in tl.range(begin, whole, KV_TILE, disable_licm=True):
        following = pages_of(pages, start + KV_TILE, end, PAGE_SIZE, KV_TILE, DESCRIPTOR)
        peak, total, weighted = attend_tile(
            q,
            peak,
            total,
            weighted,
            k_cache,
            v_cache,
            page,
            kv_head,
            start,
            end,
            limits,
            log2_scale,
            slot_stride,
            PAGE_SIZE,
            KV_TILE,
            HEAD_DIM,
            BLOCK_D,
            DESCRIPTOR,
            False,
        )
        page = following
    for start in tl.range(whole, end, KV_TILE, disable_licm=True):
        following = pages_of(pages, start + KV_TILE, end, PAGE_SIZE, KV_TILE, DESCRIPTOR)
        peak, total, weighted = attend_tile(
            q,
            peak,
            total,
            weighted,
            k_cache,
            v_cache,
            page,
            kv_head,
            start,
            end,
            limits,
            log2_scale,
            slot_stride,
            PAGE_SIZE,
            KV_TILE,
            HEAD_DIM,
            BLOCK_D,
            DESCRIPTOR,
            True,
        )
        page = following
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
    """Device: the state of both sets of tokens, not both empty in any row: [M], [M], [M, D]."""
    peak = tl.maximum(maximum, other_maximum)
    kept = tl.exp2(maximum - peak)
    added = tl.exp2(other_maximum - peak)
    total = tl.fma(total, kept, other_total * added)
    kept_wide = kept[:, None] + tl.zeros_like(weighted)
    weighted = tl.fma(weighted, kept_wide, other_weighted * added[:, None])
    return peak, total, weighted


def cache_arguments(
    k_cache: torch.Tensor, v_cache: torch.Tensor, page_size: int, kv_tile: int
) -> tuple[object, object, bool]:
    """What the kernels take for K and V: tensor descriptors where a page holds whole tiles, else the tensors.

    Descriptors let the copy engine fetch a tile with one instruction; they need a head_dim that is a power of
    two, 16 or more. The choice follows from shapes alone. Returns (k, v, whether they are descriptors).
    """
    slots, kv_heads, head_dim = k_cache.shape
    fits = page_size % kv_tile == 0 and head_dim & (head_dim - 1) == 0 and head_dim >= 16
    if not (fits and k_cache.is_contiguous() and v_cache.is_contiguous()):
        return k_cache, v_cache, False
    block = [kv_tile, head_dim]
    k, v = (descriptor(cache.view(slots, kv_heads * head_dim), block) for cache in (k_cache, v_cache))
    return k, v, True
