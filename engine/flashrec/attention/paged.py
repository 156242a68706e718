"""Attention by the engine's own kernels: their plain PyTorch references on a CPU, Triton on a GPU."""

from __future__ import annotations

import torch

from flashrec.attention.base import AttentionBackend, DecodeMeta, PrefillMeta, StaticPrefill
from flashrec.batch import Attend
from flashrec.kernels.ops import Ops
from flashrec.kernels.tiles import RowTiles, rows_per_tile
from flashrec.kvcache.pool import KVPool


class PagedAttention(AttentionBackend):
    """Both shapes through ``ops``, over the pages where they lie."""

    def __init__(self, pool: KVPool, num_heads: int, ops: Ops) -> None:
        super().__init__(pool, num_heads)
        self.ops = ops
        self.name = ops.chosen["shared_prefix_attention"]
        self.tile_rows = rows_per_tile(num_heads, pool.num_kv_heads)

    def prefill(self, meta: PrefillMeta) -> Attend:
        return lambda q, layer: self.attend_prefill(q, layer, meta.page_table, meta.kv_len, meta.positions, meta.tiles)

    def static_prefill(self, tokens: int, requests: int, pages: int) -> StaticPrefill:
        return PagedStaticPrefill(self, tokens, requests, pages)

    def attend_prefill(
        self,
        q: torch.Tensor,
        layer: int,
        page_table: torch.Tensor,
        kv_len: torch.Tensor,
        positions: torch.Tensor,
        tiles: RowTiles,
    ) -> torch.Tensor:
        """Causal attention of queries [T, heads, d]; the tensors are those of :class:`PrefillMeta`."""
        pool = self.pool
        out: torch.Tensor = self.ops.paged_prefill_attention(
            q,
            pool.k[layer],
            pool.v[layer],
            page_table,
            pool.page_size,
            kv_len,
            positions,
            tiles,
            self.tile_rows,
            self.scale,
            pool.k_scale[layer],
            pool.v_scale[layer],
        )
        return out

    def decode(self, meta: DecodeMeta) -> Attend:
        def attend(q: torch.Tensor, layer: int) -> torch.Tensor:
            pool = self.pool
            out: torch.Tensor = self.ops.shared_prefix_attention(
                q,
                pool.k[layer],
                pool.v[layer],
                meta.page_table,
                pool.page_size,
                meta.context_len,
                meta.tiles,
                self.tile_rows,
                pool.beam_base,
                meta.rows,
                meta.stored,
                meta.ancestors,
                self.scale,
                pool.k_scale[layer],
                pool.v_scale[layer],
            )
            return out

        return attend


class PagedStaticPrefill(StaticPrefill):
    """Static copies of what the prefill kernel reads: page table, lengths, positions and row tiles."""

    def __init__(self, backend: PagedAttention, tokens: int, requests: int, pages: int) -> None:
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=backend.pool.k.device)

        self.backend = backend
        self.page_table = zeros(requests, pages)
        self.kv_len = zeros(requests)
        self.positions = zeros(tokens)
        count = tokens // backend.tile_rows + requests
        self.tiles = RowTiles(zeros(count), zeros(count), zeros(count))

    def plan(self, meta: PrefillMeta) -> None:
        requests, tokens = len(meta.kv_lens), meta.positions.shape[0]
        self.page_table[:requests].copy_(meta.page_table)
        self.kv_len[:requests].copy_(meta.kv_len)
        self.positions[:tokens].copy_(meta.positions)
        for static, part in zip(self.tiles, meta.tiles, strict=True):
            static.zero_()
            static[: part.shape[0]].copy_(part)

    def attend(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        return self.backend.attend_prefill(q, layer, self.page_table, self.kv_len, self.positions, self.tiles)
