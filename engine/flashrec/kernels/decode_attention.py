"""Shared-prefix decode attention: a request's beams read its context K/V once (SPEC P2).

The rows of a request are the query tile against the context's pages; each row's own K/V of earlier steps is
found through the ancestor table; the two parts meet by log-sum-exp.
"""

from __future__ import annotations

import torch

from flashrec.kernels.decode_work import DecodeWork
from flashrec.kernels.paged_attention import (
    context_state,
    fold_heads,
    gather_rows,
    read_kv_tile,
    scatter_rows,
    unfold_heads,
)
from flashrec.kernels.quantize import quant_per_token, wide


def shared_prefix_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    ctx_len: torch.Tensor,
    work: DecodeWork,
    tile_rows: int,
    beam_base: int,
    beam_capacity: int,
    step: int,
    ancestors: torch.Tensor,
    scale: float,
    k_scale: float,
    v_scale: float,
) -> torch.Tensor:
    """Attention of ``q[rows, hq, d]`` over each row's context and its own beam path.

    ``k_cache``, ``v_cache`` [num_slots, hk, d]; ``page_table`` int32 [R, max_pages] of pages of ``page_size``
    slots; ``ctx_len`` int32 [R]; ``work`` as :func:`flashrec.kernels.decode_work.decode_work` lays it out, of tiles of
    at most ``tile_rows`` rows. The K/V of decode step ``j < step`` of a row stand in slot
    ``beam_base + j * beam_capacity + ancestors[j, row]`` (``ancestors`` int32 [>= step, >= rows]).
    ``scale`` multiplies the logits; ``k_scale`` and ``v_scale`` belong to an FP8 cache. Returns
    [rows, hq, d] in ``q.dtype``; a row that no tile covers is unspecified.
    """
    tiles = work.tiles
    num_rows, dim = q.shape[0], q.shape[2]
    num_kv_heads = k_cache.shape[1]
    rows, valid = gather_rows(tiles, tile_rows, num_rows)
    q_tiles = q[rows]
    state = context_state(
        q_tiles, k_cache, v_cache, page_table, page_size, tiles, ctx_len, None, scale, k_scale, v_scale
    )
    folded = wide(fold_heads(q_tiles, num_kv_heads))
    group = folded.shape[1] // tile_rows
    for j in range(step):
        slots = beam_base + j * beam_capacity + ancestors[j].long()[rows]
        k = read_kv_tile(k_cache, slots, valid, k_scale).repeat_interleave(group, dim=1)
        v = read_kv_tile(v_cache, slots, valid, v_scale).repeat_interleave(group, dim=1)
        state.update_own((folded * k).sum(dim=-1, keepdim=True) * scale, v)
    out = unfold_heads(state.result(), len(tiles.rows), tile_rows)
    return scatter_rows(out, rows, valid, num_rows).to(q.dtype).view(num_rows, -1, dim)


def shared_prefix_attention_quant(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    ctx_len: torch.Tensor,
    work: DecodeWork,
    tile_rows: int,
    beam_base: int,
    beam_capacity: int,
    step: int,
    ancestors: torch.Tensor,
    scale: float,
    k_scale: float,
    v_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`shared_prefix_attention`, then per-token FP8: (codes [rows, hq * d], scale f32 [rows, 1])."""
    out = shared_prefix_attention(
        q,
        k_cache,
        v_cache,
        page_table,
        page_size,
        ctx_len,
        work,
        tile_rows,
        beam_base,
        beam_capacity,
        step,
        ancestors,
        scale,
        k_scale,
        v_scale,
    )
    return quant_per_token(out.flatten(1))
