"""Attention by the engine's own kernels: their plain PyTorch references on a CPU, Triton on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from flashrec.attention.base import AttentionBackend, DecodeMeta, PrefillMeta, StaticPrefill
from flashrec.batch import Activation, Attend, Quantized
from flashrec.kernels.ops import Ops
from flashrec.kernels.tiles import RowTiles, rows_per_tile, tile_table
from flashrec.kvcache.pool import KVPool
from flashrec.transfer import StaticBlock, upload_together


class PagedAttention(AttentionBackend):
    """Both shapes through ``ops``, over the pages where they lie.

    With ``quantize``, a decode pass hands its output to the next projection as FP8, from the kernel that
    merges the context's part with the beam's.
    """

    def __init__(self, pool: KVPool, num_heads: int, ops: Ops, *, quantize: bool = False) -> None:
        super().__init__(pool, num_heads)
        self.ops = ops
        self.quantize = quantize
        self.name = ops.chosen["shared_prefix_attention"]
        self.tile_rows = rows_per_tile(num_heads, pool.num_kv_heads)

    def prefill(self, meta: PrefillMeta) -> Attend:
        return self._causal(meta, meta.query_lens, meta.positions)

    def prefill_ends(self, meta: PrefillMeta) -> Attend:
        return self._causal(meta, meta.end_lens, meta.positions[meta.ends])

    def static_prefill(self, tokens: int, requests: int, pages: int) -> StaticPrefill:
        return PagedStaticPrefill(self, tokens, requests, pages)

    def _causal(self, meta: PrefillMeta, query_lens: Sequence[int], query_positions: NDArray[np.int32]) -> Attend:
        device = self.pool.k.device
        kv_lens = np.array(meta.kv_lens, dtype=np.int32)
        table = tile_table(query_lens, self.tile_rows)
        page_table, kv_len, positions, *parts = upload_together(
            [meta.page_table, kv_lens, query_positions, *table], device
        )
        tiles = RowTiles(*parts)
        return lambda q, layer: self.attend_prefill(q, layer, page_table, kv_len, positions, tiles)

    def attend_prefill(
        self,
        q: torch.Tensor,
        layer: int,
        page_table: torch.Tensor,
        kv_len: torch.Tensor,
        positions: torch.Tensor,
        tiles: RowTiles,
    ) -> torch.Tensor:
        """Causal attention of queries [T, heads, d] over device copies of a :class:`PrefillMeta`'s fields."""
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
        return out.flatten(1)

    def decode(self, meta: DecodeMeta) -> Attend:
        operation = self.ops.shared_prefix_attention_quant if self.quantize else self.ops.shared_prefix_attention

        def attend(q: torch.Tensor, layer: int) -> Activation:
            pool = self.pool
            out = operation(
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
            return Quantized(*out) if self.quantize else out.flatten(1)

        return attend


class PagedStaticPrefill(StaticPrefill):
    """What the prefill kernel reads, in one static block: page table, lengths, positions and row tiles, the last two
    once for every token and once for the prompts' ends."""

    def __init__(self, backend: PagedAttention, tokens: int, requests: int, pages: int) -> None:
        self.backend = backend
        self.num_tiles = tokens // backend.tile_rows + requests
        # The scratch page is page 0, and a tile without rows is skipped.
        self.block = StaticBlock(
            {
                "page_table": (requests, pages),
                "kv_len": (requests,),
                "positions": (tokens,),
                "tiles": (3, self.num_tiles),
                "end_positions": (requests,),
                "end_tiles": (3, requests),
            },
            backend.pool.k.device,
        )

    def plan(self, meta: PrefillMeta) -> None:
        self.block.write(
            {
                "page_table": meta.page_table,
                "kv_len": np.array(meta.kv_lens),
                "positions": meta.positions,
                "tiles": tile_table(meta.query_lens, self.backend.tile_rows, self.num_tiles),
                "end_positions": meta.positions[meta.ends],
                "end_tiles": tile_table(meta.end_lens, self.backend.tile_rows),
            }
        )

    def attend(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        return self._attend(q, layer, "positions", "tiles")

    def attend_ends(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        return self._attend(q, layer, "end_positions", "end_tiles")

    def _attend(self, q: torch.Tensor, layer: int, positions: str, tiles: str) -> torch.Tensor:
        block = self.block
        cut = RowTiles(*block[tiles].unbind(0))
        return self.backend.attend_prefill(q, layer, block["page_table"], block["kv_len"], block[positions], cut)
