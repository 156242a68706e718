"""QK-norm, rotary embedding and the K/V store into the paged pool, from one fused QKV projection (M4, M8)."""

from __future__ import annotations

from functools import partial

import torch

from flashrec.kernels._triton import after_previous, ceil_div, jit, next_power_of_2, overlap, tl
from flashrec.kernels.quantize import FP8_MAX, wide
from flashrec.kernels.rms_norm import rms_norm

HEADS_PER_PROGRAM = 16
"""H200, 2026-11-29, 19,720 rows of 32 heads, us: 381 with 1 head a program, 89 with 8, 85 with 16, 97 with 32."""


def rotate(x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of ``x[T, heads, d]``, halves paired as in Hugging Face's ``rotate_half``.

    ``cos_sin`` is float32 [max_position, d]: d/2 cosines, then d/2 sines. Rotates in float32, rounds once.
    """
    cos, sin = cos_sin[positions.long()].unsqueeze(1).chunk(2, dim=-1)
    first, second = wide(x).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def store_rows(cache: torch.Tensor, slots: torch.Tensor, values: torch.Tensor, scale: float) -> None:
    """Writes ``values[T, heads, d]`` into rows ``slots`` of ``cache[num_slots, heads, d]``.

    An FP8 cache holds ``values / scale``, saturated; ``scale`` has no effect on another dtype.
    """
    rows = slots.long()
    if cache.dtype.itemsize == 1:
        codes = (wide(values) * (1.0 / scale)).clamp(-FP8_MAX, FP8_MAX).to(cache.dtype)
        cache.view(torch.uint8)[rows] = codes.view(torch.uint8)
    else:
        cache[rows] = values.to(cache.dtype)


def qk_norm_rope_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: float,
    v_scale: float,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> torch.Tensor:
    """Norms and rotates the Q and K heads of ``qkv[T, (hq + 2 * hk) * d]`` (any row stride).

    K (normed, rotated) and V (as it is) go into rows ``slots`` of ``k_cache`` and ``v_cache``
    [num_slots, hk, d] (float32, bf16 or e4m3fn). ``positions`` and ``slots`` are int32 or int64 [T]. Both
    weights ``None``: a model without QK-norm. Returns q [T, hq, d], contiguous, in ``qkv.dtype``.
    """
    heads = qkv.unflatten(-1, (num_q_heads + 2 * num_kv_heads, head_dim))
    q, k, v = heads.split((num_q_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    store_rows(k_cache, slots, rotate(k, cos_sin, positions), k_scale)
    store_rows(v_cache, slots, v, v_scale)
    return rotate(q, cos_sin, positions)


@jit
def _to_cache(values: tl.tensor, inverse_scale: tl.tensor, cache: tl.tensor) -> tl.tensor:
    """Device: values in the cache's dtype; FP8 is divided by its scale and clamped before the cast."""
    if cache.dtype.element_ty == tl.float8e4nv:
        scaled = values.to(tl.float32) * inverse_scale
        values = tl.minimum(tl.maximum(scaled, -448.0), 448.0)
    return values.to(cache.dtype.element_ty)


@partial(jit, varying=("positions", "slots"))
def _qk_norm_rope_store_kernel(
    qkv: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    cos_sin: tl.tensor,
    q_out: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    qkv_stride: tl.tensor,
    slot_stride: tl.tensor,
    eps: tl.tensor,
    inverse_k_scale: tl.tensor,
    inverse_v_scale: tl.tensor,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Token x ``HEADS`` consecutive heads of Q, K and V a program; a head's two halves side by side.

    ``qkv[T, heads * d]`` by row stride; ``q_out[T, hq, d]`` contiguous; caches ``[num_slots, hk, d]`` by slot
    stride; ``cos_sin`` float32 [max_position, d].
    """
    after_previous(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    lane = tl.arange(0, HALF_BLOCK)[None, :]
    half: tl.constexpr = HEAD_DIM // 2
    in_head = lane < half
    mask = in_head & (head < Q_HEADS + 2 * KV_HEADS)
    is_q = head < Q_HEADS
    is_v = head >= Q_HEADS + KV_HEADS
    dtype = qkv.dtype.element_ty
    source = qkv + token * qkv_stride + head * HEAD_DIM + lane
    first = tl.load(source, mask=mask, other=0.0)
    second = tl.load(source + half, mask=mask, other=0.0)
    x1 = first.to(tl.float32)
    x2 = second.to(tl.float32)
    if NORM:
        squares = tl.sum(x1 * x1 + x2 * x2, axis=1)[:, None]
        inverse = tl.rsqrt(squares / HEAD_DIM + eps)
        q_gain1 = tl.load(q_weight + lane, mask=in_head, other=0.0).to(tl.float32)
        q_gain2 = tl.load(q_weight + half + lane, mask=in_head, other=0.0).to(tl.float32)
        k_gain1 = tl.load(k_weight + lane, mask=in_head, other=0.0).to(tl.float32)
        k_gain2 = tl.load(k_weight + half + lane, mask=in_head, other=0.0).to(tl.float32)
        x1 = (x1 * inverse).to(dtype).to(tl.float32) * tl.where(is_q, q_gain1, k_gain1)
        x2 = (x2 * inverse).to(dtype).to(tl.float32) * tl.where(is_q, q_gain2, k_gain2)
        x1 = x1.to(dtype).to(tl.float32)
        x2 = x2.to(dtype).to(tl.float32)
    angle = cos_sin + tl.load(positions + token).to(tl.int64) * HEAD_DIM + lane
    cos = tl.load(angle, mask=in_head, other=0.0)
    sin = tl.load(angle + half, mask=in_head, other=0.0)
    y1 = (x1 * cos - x2 * sin).to(dtype)
    y2 = (x2 * cos + x1 * sin).to(dtype)
    q_target = q_out + (token * Q_HEADS + head) * HEAD_DIM + lane
    tl.store(q_target, y1, mask=mask & is_q)
    tl.store(q_target + half, y2, mask=mask & is_q)
    slot = tl.load(slots + token).to(tl.int64) * slot_stride
    k_target = k_cache + slot + (head - Q_HEADS) * HEAD_DIM + lane
    is_k = (head >= Q_HEADS) & (head < Q_HEADS + KV_HEADS)
    tl.store(k_target, _to_cache(y1, inverse_k_scale, k_cache), mask=mask & is_k)
    tl.store(k_target + half, _to_cache(y2, inverse_k_scale, k_cache), mask=mask & is_k)
    v_target = v_cache + slot + (head - Q_HEADS - KV_HEADS) * HEAD_DIM + lane
    tl.store(v_target, _to_cache(first, inverse_v_scale, v_cache), mask=mask & is_v)
    tl.store(v_target + half, _to_cache(second, inverse_v_scale, v_cache), mask=mask & is_v)


def qk_norm_rope_store_triton(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: float,
    v_scale: float,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> torch.Tensor:
    """:func:`qk_norm_rope_store` in one pass. Both caches share one slot stride."""
    tokens = qkv.shape[0]
    q = torch.empty(tokens, num_q_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    norm = q_weight is not None
    blocks = ceil_div(num_q_heads + 2 * num_kv_heads, HEADS_PER_PROGRAM)
    if tokens:
        _qk_norm_rope_store_kernel[(tokens, blocks)](
            qkv,
            positions,
            slots,
            q_weight if norm else cos_sin,
            k_weight if norm else cos_sin,
            cos_sin,
            q,
            k_cache,
            v_cache,
            qkv.stride(0),
            k_cache.stride(0),
            eps,
            1.0 / k_scale,
            1.0 / v_scale,
            Q_HEADS=num_q_heads,
            KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            HALF_BLOCK=next_power_of_2(head_dim // 2),
            HEADS=HEADS_PER_PROGRAM,
            NORM=norm,
            num_warps=2,
            **overlap(),
        )
    return q
