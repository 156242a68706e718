"""Prefill attention by FlashInfer over the paged pool; decode stays with the engine's own kernel.

FlashAttention-3 where the pool is bf16 on Hopper, FlashAttention-2 otherwise, without split-KV: a query
tile then reduces its keys in one program, in an order that depends on their positions alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from flashrec.attention.base import PrefillMeta
from flashrec.attention.paged import PagedAttention
from flashrec.batch import Attend
from flashrec.errors import ConfigError
from flashrec.kernels.ops import Ops
from flashrec.kvcache.pool import KVPool

WORKSPACE_BYTES = 128 << 20


def flashinfer_backend(device: torch.device, kv_dtype: torch.dtype) -> str:
    """``fa3`` or ``fa2``. Raises :class:`ConfigError` where FlashInfer cannot serve."""
    if device.type != "cuda":
        raise ConfigError(f"attention_backend: flashinfer needs a CUDA device, not {device.type}")
    if kv_dtype not in (torch.bfloat16, torch.float8_e4m3fn):
        raise ConfigError(f"attention_backend: flashinfer needs a bf16 or fp8_e4m3 KV cache, not {kv_dtype}")
    hopper = torch.cuda.get_device_capability(device)[0] == 9
    return "fa3" if hopper and kv_dtype is torch.bfloat16 else "fa2"


class FlashInferAttention(PagedAttention):
    """FlashInfer's paged prefill beside the shared-prefix decode kernel."""

    def __init__(self, pool: KVPool, num_heads: int, ops: Ops) -> None:
        super().__init__(pool, num_heads, ops)
        self.backend = flashinfer_backend(pool.k.device, pool.k.dtype)
        self.name = f"flashinfer {self.backend} prefill, {self.name} decode"
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=pool.k.device)
        self._wrapper = self.make_wrapper()

    def make_wrapper(self, **graph_buffers: Any) -> Any:
        """A FlashInfer wrapper; with ``graph_buffers`` one whose plan may change under a captured graph."""
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        return BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend=self.backend, **graph_buffers)

    def plan(self, wrapper: Any, meta: PrefillMeta) -> None:
        """Tell ``wrapper`` the pass's lengths and pages."""
        size = self.pool.page_size
        pages = [-(-length // size) for length in meta.kv_lens]
        kept = [page for owned, count in zip(meta.pages, pages, strict=True) for page in owned[:count]]
        last = [(length - 1) % size + 1 for length in meta.kv_lens]
        wrapper.plan(
            _offsets(meta.query_lens),
            _offsets(pages),
            torch.tensor(kept, dtype=torch.int32),
            torch.tensor(last, dtype=torch.int32),
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

    def run(self, wrapper: Any, q: torch.Tensor, layer: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Attention of a planned pass; the FP8 scales of the layer's keys and values are folded in."""
        pool = self.pool
        paged = (-1, pool.page_size, pool.num_kv_heads, pool.head_dim)
        caches = tuple(kv[layer, : pool.beam_base].view(paged) for kv in (pool.k, pool.v))
        scales = {}
        if pool.k.dtype is torch.float8_e4m3fn:
            scales = {"k_scale": pool.k_scale[layer], "v_scale": pool.v_scale[layer]}
        result: torch.Tensor = wrapper.run(q, caches, out=out, **scales)
        return result

    def prefill(self, meta: PrefillMeta) -> Attend:
        self.plan(self._wrapper, meta)
        return lambda q, layer: self.run(self._wrapper, q, layer)


def _offsets(lengths: list[int] | tuple[int, ...] | Any) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
