"""Attention by the engine's own kernels: their plain PyTorch references on a CPU, Triton on a GPU."""

from __future__ import annotations

import torch

from flashrec.attention.base import AttentionBackend, DecodeMeta, PrefillMeta
from flashrec.batch import Attend
from flashrec.kernels.ops import Ops
from flashrec.kernels.tiles import rows_per_tile
from flashrec.kvcache.pool import KVPool


class PagedAttention(AttentionBackend):
    """Both shapes through ``ops``, over the pages where they lie."""

    def __init__(self, pool: KVPool, num_heads: int, ops: Ops) -> None:
        super().__init__(pool, num_heads)
        self.ops = ops
        self.name = ops.chosen["shared_prefix_attention"]
        self.tile_rows = rows_per_tile(num_heads, pool.num_kv_heads)

    def prefill(self, meta: PrefillMeta) -> Attend:
        def attend(q: torch.Tensor, layer: int) -> torch.Tensor:
            pool = self.pool
            out: torch.Tensor = self.ops.paged_prefill_attention(
                q,
                pool.k[layer],
                pool.v[layer],
                meta.page_table,
                pool.page_size,
                meta.kv_len,
                meta.positions,
                meta.tiles,
                self.tile_rows,
                self.scale,
                pool.k_scale[layer],
                pool.v_scale[layer],
            )
            return out

        return attend

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
