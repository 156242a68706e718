"""What FlashInfer is told of a pass, by a stand-in that does in PyTorch what its documentation says of the wrapper."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_lab import DIM, Lab, Prompt
from torch.nn import functional

from flashrec.attention import flashinfer
from flashrec.attention.flashinfer import FlashInferAttention
from flashrec.kernels.ops import select_ops

WAVE = [Prompt(130), Prompt(40, 7), Prompt(90, 80), Prompt(1)]


class Wrapper:
    """``BatchPrefillWithPagedKVCacheWrapper``, layout NHD: pages [pages, size, heads, d], causal from the end."""

    def __init__(self, workspace: torch.Tensor, layout: str, *, backend: str, **graph_buffers: Any) -> None:
        assert (layout, backend) == ("NHD", "fa2")
        self.buffers = graph_buffers

    def plan(
        self,
        query_ends: torch.Tensor,
        page_ends: torch.Tensor,
        pages: torch.Tensor,
        last_page_len: torch.Tensor,
        query_heads: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        disable_split_kv: bool,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert causal
        assert disable_split_kv, "a row's bits would depend on its mates"
        assert {one.dtype for one in (query_ends, page_ends, pages, last_page_len)} == {torch.int32}
        if self.buffers:
            requests = len(self.buffers["paged_kv_last_page_len_buf"])
            assert len(last_page_len) == requests, "the number of requests is fixed under a graph"
            assert len(pages) <= len(self.buffers["paged_kv_indices_buf"])
        self.lengths = query_ends.diff().tolist()
        self.pages = pages.split(page_ends.diff().tolist())
        self.kv_lens = [
            max(0, len(part) - 1) * page_size + int(last) for part, last in zip(self.pages, last_page_len, strict=True)
        ]
        self.scale = sm_scale

    def run(
        self,
        q: torch.Tensor,
        caches: tuple[torch.Tensor, torch.Tensor],
        *,
        out: torch.Tensor | None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> torch.Tensor:
        found = torch.empty_like(q) if out is None else out
        start = 0
        for length, pages, kv_len in zip(self.lengths, self.pages, self.kv_lens, strict=True):
            if length:
                k, v = (
                    cache[pages.long()].flatten(0, 1)[:kv_len].float().transpose(0, 1) * scale
                    for cache, scale in zip(caches, (k_scale, v_scale), strict=True)
                )
                seen = torch.arange(kv_len) <= torch.arange(kv_len - length, kv_len).unsqueeze(1)
                part = q[start : start + length].transpose(0, 1)
                one = functional.scaled_dot_product_attention(
                    part[None], k[None], v[None], seen, scale=self.scale, enable_gqa=True
                )
                found[start : start + length] = one[0].transpose(0, 1)
            start += length
        return found


@pytest.fixture(params=[torch.float32, torch.float8_e4m3fn], ids=["whole", "fp8"])
def lab(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """Prompts over the engine's kernels; :func:`through_flashinfer` makes the same over FlashInfer."""
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper))
    monkeypatch.setattr(flashinfer, "flashinfer_backend", lambda device, dtype: "fa2")
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 16)
    return Lab(WAVE, dtype=request.param)


def through_flashinfer(lab: Lab) -> FlashInferAttention:
    return FlashInferAttention(lab.pool, lab.num_heads, select_ops(torch.device("cpu"), torch.float32))


def test_a_pass_is_planned_as_it_is_laid_out(lab: Lab) -> None:
    meta = lab.meta(WAVE)
    q = lab.queries(sum(meta.query_lens))
    for layer in range(2):
        found = through_flashinfer(lab).prefill(meta)(q, layer)
        torch.testing.assert_close(found, lab.prefill(meta, q, layer), atol=2e-5, rtol=2e-5)


def test_a_captured_pass_is_planned_anew_and_leaves_nothing_behind(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "bfloat16", torch.float32)  # its output buffer's, which would round
    paged, lab.attention = lab.attention, through_flashinfer(lab)
    static, plan = lab.static(256, 4)
    for parts, rows in ((WAVE, [0, 1, 2, 3]), ([Prompt(33, 2)], [1]), ([Prompt(90, 12), Prompt(1)], [2, 3])):
        meta = lab.meta(parts, rows)
        count = sum(meta.query_lens)
        q = torch.zeros(256, lab.num_heads, DIM)
        q[:count] = lab.queries(count)
        plan(meta)
        found = static.attend(q, 1)
        assert isinstance(found, torch.Tensor)
        torch.testing.assert_close(found[:count], paged.prefill(meta)(q[:count], 1), atol=2e-5, rtol=2e-5)
        ends = torch.zeros(4, lab.num_heads, DIM)
        ends[: len(parts)] = q[torch.from_numpy(meta.ends)]
        wanted = paged.prefill_ends(meta)(ends[: len(parts)], 1)
        assert isinstance(wanted, torch.Tensor)
        assert torch.equal(static.attend_ends(ends, 1)[: len(parts)], wanted)


def test_a_plan_that_forgets_the_cache_would_be_seen(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = through_flashinfer(lab)
    real = attention.plan
    monkeypatch.setattr(
        attention, "plan", lambda wrapper, queries, kv, pages: real(wrapper, queries, [n - 1 or 1 for n in kv], pages)
    )
    meta = lab.meta(WAVE)
    q = lab.queries(sum(meta.query_lens))
    assert not torch.allclose(attention.prefill(meta)(q, 0), lab.prefill(meta, q, 0), atol=1e-2)
