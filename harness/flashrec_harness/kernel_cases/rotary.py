"""Cases of QK-norm, rotary embedding and the K/V store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from flashrec_harness.equivalence import Rule
from flashrec_harness.kernel_cases.base import Argument, KernelCase, Lane, Output, draws, exact, layouts
from flashrec_harness.kernel_cases.pointwise import EPS

_CPU_HEADS = ((2, 1, 16), (4, 2, 16), (5, 1, 8), (3, 3, 24), (9, 3, 2))
_GPU_HEADS = ((16, 8, 128), (5, 1, 96))
_MAX_POSITION = 53
_SLOT_ARGUMENT, _K_ARGUMENT, _V_ARGUMENT = 2, 7, 8


def _stored(result: Any, arguments: Sequence[Any]) -> list[Output]:
    """The queries, the written rows of both caches, and every other row."""
    slots = arguments[_SLOT_ARGUMENT].long()
    outputs = [Output("q", result)]
    for name, place in (("k", _K_ARGUMENT), ("v", _V_ARGUMENT)):
        cache = arguments[place]
        fp8 = cache.dtype.itemsize == 1
        raw = cache.view(torch.uint8) if fp8 else cache
        written = raw[slots].view(cache.dtype)
        rule = Rule.CODES if fp8 else Rule.BITWISE if name == "v" else Rule.MEASURED
        others = raw.clone()
        others[slots] = 0
        outputs += [Output(f"{name} stored", written, rule), Output(f"other {name} rows", others, Rule.BITWISE)]
    return outputs


@st.composite
def qk_norm_rope_store_cases(draw: st.DrawFn, lane: Lane) -> KernelCase:
    """:func:`flashrec.kernels.qk_norm_rope_store.qk_norm_rope_store`."""
    tokens = draw(lane.pick((0, 1, 2, 7, 13), (0, 1, 17, 257)))
    q_heads, kv_heads, dim = draw(st.sampled_from(_GPU_HEADS if lane.compiled else _CPU_HEADS))
    data, (pad, offset) = draw(draws(lane)), draw(layouts(lane))
    index = torch.int32 if lane.compiled else draw(st.sampled_from([torch.int32, torch.int64]))
    norm = draw(st.booleans())
    fp8 = lane.compiled and draw(st.booleans())
    k_scale, v_scale = draw(st.sampled_from([(1.0, 1.0), (0.5, 0.25)])) if fp8 else (1.0, 1.0)
    qkv = data.normal(tokens, (q_heads + 2 * kv_heads) * dim)
    q_weight, k_weight = (data.uniform(dim, low=0.5, high=1.5) if norm else None for _ in range(2))
    angles = data.uniform(_MAX_POSITION, dim // 2, low=0.0, high=6.3).float()
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    num_slots = tokens + 5
    cache_dtype = torch.float8_e4m3fn if fp8 else lane.dtype
    k_cache, v_cache = (data.normal(num_slots, kv_heads, dim).to(cache_dtype) for _ in range(2))
    positions = data.integers(tokens, high=_MAX_POSITION).to(index)
    slots = data.permutation(num_slots)[:tokens].to(index)
    tail = (k_scale, v_scale, q_heads, kv_heads, dim)
    weights = tuple(None if w is None else Argument(w) for w in (q_weight, k_weight))
    return KernelCase(
        f"{tokens} tokens, {q_heads}/{kv_heads} heads of {dim}, norm {norm}, fp8 cache {fp8}, pad {pad}",
        (
            Argument(qkv, pad, offset),
            Argument(positions),
            Argument(slots),
            *weights,
            EPS,
            Argument(cos_sin),
            Argument(k_cache, writable=True),
            Argument(v_cache, writable=True),
            *tail,
        ),
        (
            exact(qkv),
            positions,
            slots,
            exact(q_weight),
            exact(k_weight),
            EPS,
            exact(cos_sin),
            exact(k_cache),
            exact(v_cache),
            *tail,
        ),
        _stored,
        {},
    )
