"""Attention by the engine's own kernels: their plain PyTorch references on a CPU, Triton on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from flashrec.attention.base import AttentionBackend, DecodeMeta, PrefillMeta, StaticPrefill
from flashrec.batch import Activation, Attend, Quantized
from flashrec.kernels.ops import Ops
from flashrec.kernels.tiles import TALL_TILE_M, RowTiles, rows_per_tile, tile_table
from flashrec.kvcache.pool import KVPool
from flashrec.transfer import StaticBlock, upload_together

TALL_TOKENS, TALL_CONTEXT = 4096, 2048
"""A pass of that many tokens or more, one of them that far into its prompt, is cut into tall tiles.

H200, 2026-12-01, short / tall in us: 32 x 303 82 / 90, 32 x 600 186 / 195, 8 x 1,000 104 / 106, 1 x 2,465 63 / 61,
8 x 2,465 496 / 436. The bits are the same."""


def takes_tall_tiles(ops: Ops, tokens: int, context: int) -> bool:
    """Whether a pass of ``tokens`` prompt tokens, the furthest being number ``context`` of its prompt, is cut so."""
    return ops.tall_tiles and tokens >= TALL_TOKENS and context >= TALL_CONTEXT


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
        self.tall_rows = rows_per_tile(num_heads, pool.num_kv_heads, TALL_TILE_M)

    def prefill(self, meta: PrefillMeta) -> Attend:
        rows = self.prefill_tile_rows(len(meta.positions), max(meta.kv_lens))
        return self._causal(meta, meta.query_lens, meta.positions, rows)

    def prefill_ends(self, meta: PrefillMeta) -> Attend:
        return self._causal(meta, meta.end_lens, meta.positions[meta.ends], self.tile_rows)

    def prefill_tile_rows(self, tokens: int, context: int) -> int:
        """Query rows of a tile of a pass; see :func:`takes_tall_tiles`."""
        return self.tall_rows if takes_tall_tiles(self.ops, tokens, context) else self.tile_rows

    def static_prefill(self, tokens: int, requests: int, pages: int) -> StaticPrefill:
        return PagedStaticPrefill(self, tokens, requests, pages)

    def _causal(
        self, meta: PrefillMeta, query_lens: Sequence[int], query_positions: NDArray[np.int32], tile_rows: int
    ) -> Attend:
        device = self.pool.k.device
        kv_lens = np.array(meta.kv_lens, dtype=np.int32)
        table = tile_table(query_lens, tile_rows)
        page_table, kv_len, positions, *parts = upload_together(
            [meta.page_table, kv_lens, query_positions, *table], device
        )
        tiles = RowTiles(*parts)
        return lambda q, layer: self.attend_prefill(q, layer, page_table, kv_len, positions, tiles, tile_rows)

    def attend_prefill(
        self,
        q: torch.Tensor,
        layer: int,
        page_table: torch.Tensor,
        kv_len: torch.Tensor,
        positions: torch.Tensor,
        tiles: RowTiles,
        tile_rows: int,
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
            tile_rows,
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
                meta.work,
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


@functools.lru_cache
def _end_tiles(end_lens: tuple[int, ...], tile_rows: int) -> NDArray[np.int32]:
    """A tile for each prompt that ends in a pass, mostly all of them; read-only."""
    table = tile_table(end_lens, tile_rows)
    table.flags.writeable = False
    return table


class PagedStaticPrefill(StaticPrefill):
    """What the prefill kernel reads: page table, lengths, positions and row tiles, the last two once for every token
    and once for the prompts' ends."""

    block: StaticBlock
    positions: torch.Tensor
    """What :meth:`attach` was given."""

    def __init__(self, backend: PagedAttention, tokens: int, requests: int, pages: int) -> None:
        self.backend = backend
        self.tile_rows = backend.prefill_tile_rows(tokens, pages * backend.pool.page_size)
        self.num_tiles = tokens // self.tile_rows + requests
        # Zeros beyond a pass's: the scratch page is page 0, and a tile without rows is skipped.
        self.fields = {
            "page_table": (requests, pages),
            "kv_len": (requests,),
            "tiles": (3, self.num_tiles),
            "end_positions": (requests,),
            "end_tiles": (3, requests),
        }

    def attach(self, block: StaticBlock, positions: torch.Tensor) -> None:
        self.block = block
        self.positions = positions

    def plan(self, meta: PrefillMeta) -> Mapping[str, NDArray[np.integer]]:
        return {
            "page_table": meta.page_table,
            "kv_len": np.array(meta.kv_lens),
            "tiles": tile_table(meta.query_lens, self.tile_rows, self.num_tiles),
            "end_positions": meta.positions[meta.ends],
            "end_tiles": _end_tiles(tuple(meta.end_lens), self.backend.tile_rows),
        }

    def attend(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        return self._attend(q, layer, self.positions, "tiles", self.tile_rows)

    def attend_ends(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        return self._attend(q, layer, self.block["end_positions"], "end_tiles", self.backend.tile_rows)

    def _attend(self, q: torch.Tensor, layer: int, positions: torch.Tensor, tiles: str, tile_rows: int) -> torch.Tensor:
        block = self.block
        cut = RowTiles(*block[tiles].unbind(0))
        page_table, kv_len = block["page_table"], block["kv_len"]
        return self.backend.attend_prefill(q, layer, page_table, kv_len, positions, cut, tile_rows)
