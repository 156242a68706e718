"""A pool of random keys and values to attend over, and PyTorch's own attention beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from flashrec.attention.base import PrefillMeta, StaticPrefill
from flashrec.attention.paged import PagedAttention
from flashrec.kernels.ops import select_ops
from flashrec.kvcache.pool import KVPool
from flashrec.transfer import StaticBlock

CPU = torch.device("cpu")
DIM = 8


@dataclass(frozen=True)
class Prompt:
    """``length`` tokens in the pool, of which the pass computes those from ``cached`` on."""

    length: int
    cached: int = 0


class Lab:
    """A pool full of random keys and values, in which prompts own scattered pages."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        heads: tuple[int, int] = (4, 2),
        page_size: int = 16,
        *,
        beam_slots: int = 0,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        self.prompts = prompts
        self.num_heads, kv_heads = heads
        counts = [-(-prompt.length // page_size) for prompt in prompts]
        self.pool = KVPool.allocate(
            num_layers=2,
            num_kv_heads=kv_heads,
            head_dim=DIM,
            num_pages=sum(counts) + 3,
            page_size=page_size,
            beam_slots=beam_slots,
            dtype=dtype,
            device=CPU,
            k_scale=(0.5, 2.0),
            v_scale=(0.25, 3.0),
        )
        self.random = torch.Generator().manual_seed(seed)
        for cache in (self.pool.k, self.pool.v):
            cache.copy_(torch.randn(cache.shape, generator=self.random))
        free = list(np.random.default_rng(seed).permutation(np.arange(1, sum(counts) + 3)))
        self.pages = [[int(free.pop()) for _ in range(count)] for count in counts]
        ops = select_ops(CPU, torch.float32)
        self.attention = PagedAttention(self.pool, self.num_heads, ops)

    def queries(self, rows: int) -> torch.Tensor:
        return torch.randn(rows, self.num_heads, DIM, generator=self.random)

    def table(self) -> torch.Tensor:
        """Pages of every prompt; what stands behind them is the scratch page."""
        width = max(map(len, self.pages)) + 1
        return torch.tensor([[*pages, *[0] * (width - len(pages))] for pages in self.pages], dtype=torch.int32)

    def meta(
        self, parts: Sequence[Prompt], rows: Sequence[int] | None = None, ending: Sequence[bool] | None = None
    ) -> PrefillMeta:
        """A pass that computes ``parts``; ``rows`` are the prompts that they belong to; all or some are ``ending``."""
        owners = range(len(parts)) if rows is None else rows
        positions = [np.arange(part.cached, part.length, dtype=np.int32) for part in parts]
        lengths = [part.length - part.cached for part in parts]
        last = np.cumsum(lengths) - 1
        return PrefillMeta(
            query_lens=lengths,
            kv_lens=[part.length for part in parts],
            page_table=self.table()[list(owners)].numpy(),
            positions=np.concatenate(positions),
            ends=last if ending is None else last[list(ending)],
        )

    def static(self, tokens: int, requests: int) -> tuple[StaticPrefill, Callable[[PrefillMeta], None]]:
        """Attention on static buffers, and what lays a pass out in them."""
        static = self.attention.static_prefill(tokens, requests, pages=self.table().shape[1])
        block = StaticBlock({"other": (3,), "asked": (tokens,), **static.fields}, CPU)
        static.attach(block, block["asked"])
        return static, lambda meta: block.write({"asked": meta.positions, **static.plan(meta)})

    def prefill(self, meta: PrefillMeta, q: torch.Tensor, layer: int = 0) -> torch.Tensor:
        found = self.attention.prefill(meta)(q, layer)
        assert isinstance(found, torch.Tensor)
        return found

    def slots(self, prompt: int) -> torch.Tensor:
        size = self.pool.page_size
        length = self.prompts[prompt].length
        return torch.tensor([self.pages[prompt][place // size] * size + place % size for place in range(length)])

    def sdpa(self, q: torch.Tensor, slots: torch.Tensor, layer: int, mask: torch.Tensor | None = None) -> torch.Tensor:
        """``torch`` attention in float64 of ``q`` [rows, heads, d] over the keys in ``slots``: [rows, heads * d]."""
        scales = (self.pool.k_scale, self.pool.v_scale) if self.pool.k.dtype.itemsize == 1 else ((1.0,) * 2,) * 2
        k, v = (
            cache[layer][slots].double().transpose(0, 1) * scale[layer]
            for cache, scale in zip((self.pool.k, self.pool.v), scales, strict=True)
        )
        out = functional.scaled_dot_product_attention(
            q.double().transpose(0, 1).unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), mask, enable_gqa=True
        )
        return out[0].transpose(0, 1).flatten(1)
