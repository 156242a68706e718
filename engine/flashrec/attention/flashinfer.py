"""Prefill attention by FlashInfer over the paged pool; decode stays with the engine's own kernel.

FlashAttention-3 where the pool is bf16 on Hopper, FlashAttention-2 otherwise, without split-KV: a query
tile then reduces its keys in one program, in an order that depends on their positions alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flashrec.attention.base import PrefillMeta, StaticPrefill
from flashrec.attention.paged import PagedAttention, PagedStaticPrefill
from flashrec.batch import Activation, Attend
from flashrec.errors import ConfigError
from flashrec.kernels.ops import Ops
from flashrec.kvcache.pool import SCRATCH_PAGE, KVPool
from flashrec.transfer import StaticBlock

WORKSPACE_BYTES = 128 << 20


def flashinfer_backend(device: torch.device, kv_dtype: torch.dtype) -> str:
    """``fa3`` or ``fa2``. Raises :class:`ConfigError` where FlashInfer cannot serve."""
    if kv_dtype not in (torch.bfloat16, torch.float8_e4m3fn):
        raise ConfigError(f"attention_backend: flashinfer needs a bf16 or fp8_e4m3 KV cache, not {kv_dtype}")
    hopper = torch.cuda.get_device_capability(device)[0] == 9
    return "fa3" if hopper and kv_dtype is torch.bfloat16 else "fa2"


class FlashInferAttention(PagedAttention):
    """FlashInfer's paged prefill beside the engine's kernels for prompts' ends and for decode."""

    def __init__(self, pool: KVPool, num_heads: int, ops: Ops, *, quantize: bool = False) -> None:
        super().__init__(pool, num_heads, ops, quantize=quantize)
        self.backend = flashinfer_backend(pool.k.device, pool.k.dtype)
        self.name = f"flashinfer {self.backend} prefill, {self.name} decode"
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=pool.k.device)
        self._wrapper = self.make_wrapper()

    def make_wrapper(self, **graph_buffers: Any) -> Any:
        """A FlashInfer wrapper; with ``graph_buffers`` one whose plan may change under a captured graph."""
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        return BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend=self.backend, **graph_buffers)

    def plan(self, wrapper: Any, query_lens: Sequence[int], kv_lens: Sequence[int], pages: Sequence[int]) -> None:
        """Tell ``wrapper`` a pass's lengths per request, and the pages of all of them in order."""
        size = self.pool.page_size
        wrapper.plan(
            _offsets(query_lens),
            _offsets([-(-length // size) for length in kv_lens]),
            torch.tensor(pages, dtype=torch.int32),
            torch.tensor([(length - 1) % size + 1 if length else 0 for length in kv_lens], dtype=torch.int32),
            self.num_heads,
            self.pool.num_kv_heads,
            self.pool.head_dim,
            size,
            causal=True,
            sm_scale=self.scale,
            q_data_type=torch.bfloat16,
            kv_data_type=self.pool.k.dtype,
            disable_split_kv=True,
        )

    def pages(self, meta: PrefillMeta) -> list[int]:
        """The pages that hold the pass's keys, request after request."""
        size = self.pool.page_size
        return [
            page
            for owned, length in zip(meta.page_table.tolist(), meta.kv_lens, strict=True)
            for page in owned[: -(-length // size)]
        ]

    def run(self, wrapper: Any, q: torch.Tensor, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Attention of a planned pass; the FP8 scales of the layer's keys and values are folded in."""
        pool = self.pool
        paged = (-1, pool.page_size, pool.num_kv_heads, pool.head_dim)
        caches = tuple(kv[layer, : pool.beam_base].view(paged) for kv in (pool.k, pool.v))
        scales = {}
        if pool.k.dtype is torch.float8_e4m3fn:
            scales = {"k_scale": pool.k_scale[layer], "v_scale": pool.v_scale[layer]}
        result: torch.Tensor = wrapper.run(q, caches, out=out, **scales)
        return result.flatten(1)

    def prefill(self, meta: PrefillMeta) -> Attend:
        self.plan(self._wrapper, meta.query_lens, meta.kv_lens, self.pages(meta))
        return lambda q, layer: self.run(self._wrapper, q, layer)

    def static_prefill(self, tokens: int, requests: int, pages: int) -> StaticPrefill:
        return FlashInferStaticPrefill(self, tokens, requests, pages)


class FlashInferStaticPrefill(StaticPrefill):
    """A wrapper with a plan of its own in static buffers, always for the same number of requests.

    The output buffer starts as zeros and is written only where a pass has tokens: rows beyond them stay
    finite, so what a graph computes from them is inert.
    """

    def __init__(self, backend: FlashInferAttention, tokens: int, requests: int, pages: int) -> None:
        pool = backend.pool

        def zeros(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=pool.k.device)

        self.backend = backend
        self.requests = requests
        self.ends = PagedStaticPrefill(backend, tokens, requests, pages)
        self.fields = self.ends.fields
        self.wrapper = backend.make_wrapper(
            use_cuda_graph=True,
            qo_indptr_buf=zeros(requests + 1),
            paged_kv_indptr_buf=zeros(requests + 1),
            paged_kv_indices_buf=zeros(requests * pages),
            paged_kv_last_page_len_buf=zeros(requests),
        )
        shape = (tokens, backend.num_heads, pool.head_dim)
        self.out = torch.zeros(shape, dtype=torch.bfloat16, device=pool.k.device)
        # The first plan fixes the most rows that a later one may have.
        backend.plan(
            self.wrapper, [tokens] + [0] * (requests - 1), [tokens] + [0] * (requests - 1), self._scratch(tokens)
        )

    def attach(self, block: StaticBlock, positions: torch.Tensor) -> None:
        self.ends.attach(block, positions)

    def plan(self, meta: PrefillMeta) -> Mapping[str, NDArray[np.integer]]:
        inert = [0] * (self.requests - len(meta.kv_lens))
        self.backend.plan(self.wrapper, [*meta.query_lens, *inert], [*meta.kv_lens, *inert], self.backend.pages(meta))
        return self.ends.plan(meta)

    def attend(self, q: torch.Tensor, layer: int) -> Activation:
        return self.backend.run(self.wrapper, q, layer, self.out)

    def attend_ends(self, q: torch.Tensor, layer: int) -> Activation:
        return self.ends.attend_ends(q, layer)

    def _scratch(self, tokens: int) -> list[int]:
        return [SCRATCH_PAGE] * -(-tokens // self.backend.pool.page_size)


def _offsets(lengths: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
