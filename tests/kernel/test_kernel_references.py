"""The plain references against transformers, textbook formulas and brute force."""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from flashrec.kernels.decode_attention import shared_prefix_attention
from flashrec.kernels.decode_work import decode_work
from flashrec.kernels.linear import linear_fp8
from flashrec.kernels.prefill_attention import paged_prefill_attention
from flashrec.kernels.qk_norm_rope_store import qk_norm_rope_store
from flashrec.kernels.quantize import quant_per_token, quantize_weight
from flashrec.kernels.rms_norm import add_rms_norm, add_rms_norm_quant, rms_norm
from flashrec.kernels.silu_mul import silu_mul
from flashrec.kernels.tiles import count_row_tiles, row_tiles, rows_per_tile

EPS = 1e-6


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_rounds_as_transformers_does(dtype: torch.dtype, generator: torch.Generator) -> None:
    x = torch.randn(5, 96, generator=generator).to(dtype)
    norm = Qwen3RMSNorm(96, eps=EPS).to(dtype)
    norm.weight.data.uniform_(0.5, 1.5, generator=generator)
    assert torch.equal(rms_norm(x, norm.weight.data, EPS), norm(x).detach())


def test_add_rms_norm_keeps_the_residual_stream(generator: torch.Generator) -> None:
    x, residual = torch.randn(2, 4, 32, generator=generator).bfloat16()
    weight = torch.ones(32).bfloat16()
    normed, summed = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(summed, x + residual)
    assert torch.equal(normed, rms_norm(x + residual, weight, EPS))
    assert add_rms_norm(x, None, weight, EPS)[1] is x
    codes, scale, _ = add_rms_norm_quant(x, residual, weight, EPS)
    assert torch.equal(codes.float(), quant_per_token(normed)[0].float())
    assert scale.shape == (4, 1)


def test_rope_and_store_agree_with_transformers(generator: torch.Generator) -> None:
    tokens, q_heads, kv_heads, dim = 6, 4, 2, 16
    qkv = torch.randn(tokens, (q_heads + 2 * kv_heads) * dim, generator=generator)
    angles = torch.rand(20, dim // 2, generator=generator) * 6.0
    positions = torch.tensor([3, 0, 19, 7, 7, 1])
    slots = torch.tensor([5, 2, 8, 0, 9, 3])
    k_cache, v_cache = torch.zeros(2, 11, kv_heads, dim)
    weights = torch.rand(2, dim, generator=generator) + 0.5
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    shape = (1.0, 1.0, q_heads, kv_heads, dim)
    q_out = qk_norm_rope_store(qkv, positions, slots, *weights, EPS, table, k_cache, v_cache, *shape)
    q, k, v = qkv.view(tokens, -1, dim).split((q_heads, kv_heads, kv_heads), dim=1)
    q, k = rms_norm(q, weights[0], EPS), rms_norm(k, weights[1], EPS)
    cos, sin = (f(torch.cat((angles, angles), dim=-1))[positions] for f in (torch.cos, torch.sin))
    q, k = (t.transpose(0, 1)[None] for t in (q, k))
    q, k = apply_rotary_pos_emb(q, k, cos[None], sin[None])
    torch.testing.assert_close(q_out, q[0].transpose(0, 1), rtol=0, atol=1e-6)
    torch.testing.assert_close(k_cache[slots], k[0].transpose(0, 1), rtol=0, atol=1e-6)
    assert torch.equal(v_cache[slots], v)
    assert not k_cache[[1, 4, 6, 7, 10]].any()


def test_fp8_cache_holds_saturated_codes_over_its_scale() -> None:
    qkv = torch.tensor([[1.0, 2.0, 3.0, 4.0, 300.0, -5000.0]])
    k_cache, v_cache = (torch.zeros(1, 1, 2).to(torch.float8_e4m3fn) for _ in range(2))
    zero = torch.zeros(1, dtype=torch.int32)
    table = torch.tensor([[1.0, 0.0]])
    qk_norm_rope_store(qkv, zero, zero, None, None, EPS, table, k_cache, v_cache, 0.5, 2.0, 1, 1, 2)
    assert k_cache.float().flatten().tolist() == [6.0, 8.0]
    assert v_cache.float().flatten().tolist() == [144.0, -448.0]  # 150 is between the codes 144 and 160


@hypothesis.given(st.integers(0, 2**31 - 1), st.sampled_from([1e-3, 1.0, 1e3]))
def test_quantisation_error_is_half_a_step(seed: int, magnitude: float) -> None:
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(seed)) * magnitude
    codes, scale = quant_per_token(x)
    absmax = x.abs().amax(dim=-1, keepdim=True)
    torch.testing.assert_close(scale, absmax / 448.0)
    error = (codes.float() * scale - x).abs()
    assert bool((error <= torch.maximum(x.abs() * 2.0**-4, absmax * 2.0**-18)).all())


def test_a_zero_row_and_channel_quantise_to_zero() -> None:
    codes, scale = quant_per_token(torch.zeros(1, 8))
    assert not codes.float().any()
    assert torch.isfinite(scale).all()
    assert bool((scale > 0).all())
    w_codes, w_scale = quantize_weight(torch.eye(4))
    assert w_scale.shape == (4,)
    torch.testing.assert_close(w_codes.float() * w_scale[:, None], torch.eye(4))


def test_linear_fp8_multiplies_dequantised_operands(generator: torch.Generator) -> None:
    x, x_scale = quant_per_token(torch.randn(5, 24, generator=generator))
    w, w_scale = quantize_weight(torch.randn(7, 24, generator=generator))
    expected = (x.double() * x_scale.double()) @ (w.double() * w_scale.double()[:, None]).T
    out = linear_fp8(x, x_scale, w, w_scale, torch.float32)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_silu_mul_takes_the_gate_first() -> None:
    gate_up = torch.tensor([[1.0, -2.0, 3.0, 5.0]])
    sigmoid = [1.0 / (1.0 + np.exp(-g)) for g in (1.0, -2.0)]
    expected = torch.tensor([[1.0 * sigmoid[0] * 3.0, -2.0 * sigmoid[1] * 5.0]], dtype=torch.float32)
    torch.testing.assert_close(silu_mul(gate_up), expected)


def _softmax_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """One row over all its tokens in float64: q [hq, d], k and v [tokens, hk, d]."""
    group = q.shape[0] // k.shape[1]
    keys, values = (t.double().repeat_interleave(group, dim=1) for t in (k, v))
    weights = torch.softmax(torch.einsum("hd,thd->ht", q.double(), keys) * scale, dim=-1)
    return torch.einsum("ht,thd->hd", weights, values)


def test_decode_attention_equals_a_softmax_over_context_and_ancestors(generator: torch.Generator) -> None:
    lengths, beams, page, steps, heads, kv_heads, dim = [5, 130, 64], [3, 1, 7], 4, 2, 4, 2, 8
    rows, pages = sum(beams), 33
    table = torch.randperm(3 * pages, generator=generator).reshape(3, pages).int()
    base = 3 * pages * page
    k, v = (torch.randn(base + steps * rows, kv_heads, dim, generator=generator) for _ in range(2))
    q = torch.randn(rows, heads, dim, generator=generator)
    ancestors = torch.randint(0, rows, (steps, rows), generator=generator).int()
    tile = rows_per_tile(heads, kv_heads)
    ctx_len = torch.tensor(lengths, dtype=torch.int32)
    place = (tile, base, rows, steps, ancestors)
    work = decode_work(beams, lengths, tile, kv_heads, spare=2)
    out = shared_prefix_attention(q, k, v, table, page, ctx_len, work, *place, 0.3, 1.0, 1.0)
    owner = [request for request, count in enumerate(beams) for _ in range(count)]
    for row, request in enumerate(owner):
        context = [int(table[request, t // page]) * page + t % page for t in range(lengths[request])]
        slots = context + [base + j * rows + int(ancestors[j, row]) for j in range(steps)]
        expected = _softmax_attention(q[row], k[slots], v[slots], 0.3)
        torch.testing.assert_close(out[row].double(), expected, rtol=1e-5, atol=1e-5)


def test_prefill_attention_is_causal_behind_a_cached_prefix(generator: torch.Generator) -> None:
    lengths, cached, page, heads, kv_heads, dim = [6, 70], [2, 33], 8, 2, 1, 4
    pages = 9
    table = torch.randperm(2 * pages, generator=generator).reshape(2, pages).int()
    k, v = (torch.randn(2 * pages * page, kv_heads, dim, generator=generator) for _ in range(2))
    fresh = [n - c for n, c in zip(lengths, cached, strict=True)]
    q = torch.randn(sum(fresh), heads, dim, generator=generator)
    positions = torch.cat([torch.arange(c, n) for c, n in zip(cached, lengths, strict=True)])
    tile = rows_per_tile(heads, kv_heads)
    kv_len = torch.tensor(lengths, dtype=torch.int32)
    tiles = row_tiles(fresh, tile)
    out = paged_prefill_attention(q, k, v, table, page, kv_len, positions, tiles, tile, 0.5, 1.0, 1.0)
    owner = [request for request, count in enumerate(fresh) for _ in range(count)]
    for row, request in enumerate(owner):
        slots = [int(table[request, t // page]) * page + t % page for t in range(int(positions[row]) + 1)]
        expected = _softmax_attention(q[row], k[slots], v[slots], 0.5)
        torch.testing.assert_close(out[row].double(), expected, rtol=1e-5, atol=1e-5)


@hypothesis.given(st.lists(st.integers(0, 70), max_size=6), st.sampled_from([1, 2, 32]), st.integers(0, 3))
def test_row_tiles_cover_every_row_once(rows: list[int], tile: int, spare: int) -> None:
    needed = count_row_tiles(rows, tile)
    tiles = row_tiles(rows, tile, needed + spare)
    covered = [
        (int(request), int(start) + i) for request, start, count in zip(*tiles, strict=True) for i in range(int(count))
    ]
    owner = [request for request, count in enumerate(rows) for _ in range(count)]
    assert covered == [(request, row) for row, request in enumerate(owner)]
    assert all(0 <= int(count) <= tile for count in tiles.rows)
    if needed:
        with pytest.raises(ValueError, match="enlarge the bucket"):
            row_tiles(rows, tile, needed - 1)
