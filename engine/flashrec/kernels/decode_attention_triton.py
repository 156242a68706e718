"""Shared-prefix decode attention on the device: a context kernel by piece of context, then a merge by row."""

from __future__ import annotations

import torch

from flashrec.kernels._softmax import LOG2E, cache_arguments
from flashrec.kernels._triton import next_power_of_2, overlap
from flashrec.kernels.decode_context_triton import context_kernel
from flashrec.kernels.decode_merge_triton import merge_kernel
from flashrec.kernels.decode_work import PIECE_FIELDS, DecodeWork, programs
from flashrec.kernels.paged_attention import KV_TILE
from flashrec.kernels.quantize import ABSMAX_FLOOR, empty_codes

CONTEXT_WARPS = 4
"""H200, 2026-12-03, us a layer of 8 x 512 rows over 2,465 tokens with four / eight: an FP8 cache and pages of 64
405 / 697, bf16 and pages of 64 232 / 517, of 16 344 / 586."""
CONTEXT_STAGES = 3
PREFETCH = 4
"""States, or a beam's own tokens after its first two, whose loads the merge kernel has in flight together."""


def _launch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    work: DecodeWork,
    tile_rows: int,
    beam_base: int,
    beam_capacity: int,
    step: int,
    ancestors: torch.Tensor,
    scale: float,
    k_scale: float,
    v_scale: float,
    out: torch.Tensor,
    out_scale: torch.Tensor | None,
) -> None:
    rows, q_heads, head_dim = q.shape
    kv_heads = k_cache.shape[1]
    tiles, states, pieces = work
    num_tiles = tiles.rows.shape[0]
    if rows == 0 or len(pieces) == 0:
        return
    quantised = k_cache.element_size() == 1
    log2_scale = scale * LOG2E * (k_scale if quantised else 1.0)
    value_scale = v_scale if quantised else 1.0
    block_d = max(16, next_power_of_2(head_dim))
    group_block = next_power_of_2(q_heads // kv_heads)
    shape = (len(pieces), kv_heads, tile_rows * group_block)
    partial = torch.empty(*shape, block_d, dtype=torch.float32, device=q.device)
    peaks, totals = torch.empty(2, *shape, dtype=torch.float32, device=q.device)
    k_tiles, v_tiles, descriptor = cache_arguments(k_cache, v_cache, page_size, KV_TILE)
    context_kernel[(kv_heads, min(programs(kv_heads), len(pieces)))](
        q,
        k_tiles,
        v_tiles,
        page_table,
        states,
        pieces,
        partial,
        peaks,
        totals,
        log2_scale,
        page_table.stride(0),
        k_cache.stride(0),
        num_tiles,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        GROUP_BLOCK=group_block,
        TILE_ROWS=tile_rows,
        PAGE_SIZE=page_size,
        KV_TILE=KV_TILE,
        FIELDS=PIECE_FIELDS,
        DESCRIPTOR=descriptor,
        num_warps=CONTEXT_WARPS,
        num_stages=CONTEXT_STAGES,
        **overlap(),
    )
    merge_kernel[(num_tiles, tile_rows)](
        q,
        k_cache,
        v_cache,
        tiles.row0,
        tiles.rows,
        states,
        partial,
        peaks,
        totals,
        ancestors,
        out,
        out if out_scale is None else out_scale,
        beam_base,
        beam_capacity,
        step,
        ancestors.stride(0),
        log2_scale,
        value_scale,
        k_cache.stride(0),
        ABSMAX_FLOOR,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        HEAD_BLOCK=next_power_of_2(q_heads),
        GROUP_BLOCK=group_block,
        TILE_ROWS=tile_rows,
        QUANTIZE=out_scale is not None,
        PREFETCH=PREFETCH,
        num_warps=4,
        **overlap(),
    )


def shared_prefix_attention_triton(
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
    """:func:`flashrec.kernels.decode_attention.shared_prefix_attention`; ``q`` contiguous."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _launch(
        q,
        k_cache,
        v_cache,
        page_table,
        page_size,
        work,
        tile_rows,
        beam_base,
        beam_capacity,
        step,
        ancestors,
        scale,
        k_scale,
        v_scale,
        out,
        None,
    )
    return out


def shared_prefix_attention_quant_triton(
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
    """:func:`flashrec.kernels.decode_attention.shared_prefix_attention_quant`; ``q`` contiguous."""
    codes, out_scale = empty_codes(q, q.shape[1] * q.shape[2])
    _launch(
        q,
        k_cache,
        v_cache,
        page_table,
        page_size,
        work,
        tile_rows,
        beam_base,
        beam_capacity,
        step,
        ancestors,
        scale,
        k_scale,
        v_scale,
        codes,
        out_scale,
    )
    return codes, out_scale
