"""Shared-prefix decode attention on the device: a context kernel by request tile, then a merge by row.

The context is cut into splits of a fixed number of tokens, each with its own softmax state from scratch, and
states are merged in order. With few tiles the splits run in parallel and the second kernel merges them; with
many, the first kernel merges as it goes. Both perform the same operations in the same order, so which one
runs, a matter of how many tiles the bucket has, leaves a row's bits alone.
"""

from __future__ import annotations

import torch

from flashrec.kernels._softmax import LOG2E, cache_arguments
from flashrec.kernels._triton import ceil_div, next_power_of_2, overlap
from flashrec.kernels.decode_context_triton import context_kernel
from flashrec.kernels.decode_merge_triton import merge_kernel
from flashrec.kernels.paged_attention import KV_TILE
from flashrec.kernels.quantize import ABSMAX_FLOOR, empty_codes
from flashrec.kernels.tiles import RowTiles

SPLIT_TOKENS = 1024
"""Tokens of one context split; a quarter of it where a context is no longer than one, half of it where it is at most
four times as long. A row's reduction order so depends on its context alone.

H200, 2026-12-02, ms of a wave. Contexts of up to 1,024 tokens in splits of 128 / 256 / 1,024: 1 x 303, n = 50 5.26 /
5.39 / 5.42, 8 x 303, n = 50 13.9 / 13.6 / 13.7; of 256 / 1,024: 1 x 1,000, n = 256 8.32 / 8.54. Contexts of up to 2,560
in splits of 256 / 512: 1 x 2,465, n = 50 12.7 / 12.6, n = 512 17.6 / 16.9."""
_SPLITS = (
    (SPLIT_TOKENS, SPLIT_TOKENS // 4),
    (4 * SPLIT_TOKENS, SPLIT_TOKENS // 2),
    (1 << 62, SPLIT_TOKENS),
)
"""(length that a context does not exceed, tokens of a split), as :func:`split_of` on the device."""
FULL_CHIP = 132
"""Tiles x K/V heads from which the context kernel fills the chip without parallel splits.

H200, 2026-11-29, us with / without: 1 x 50 rows over 2,465 tokens 16 / 43; 8 x 50: 51 / 53; 32 x 50: 171 / 132."""
AT_ONCE = 2 * 132
"""Programs of the context kernel that an H200 holds at once. They take the pairs of tile and split in turns: a program
for each pair that a bucket has room for would be thousands that find nothing to do.

H200, 2026-12-02, ms of a wave, a program for each / in turns: 1 x 1,000 tokens, n = 256 9.31 / 8.56, 1 x 2,465, n = 512
17.9 / 16.9, 8 x 303, n = 50 15.1 / 13.7; 1 x 303 and 1 x 2,465, n = 50 within 0.4 %. 528 programs were no faster."""
CONTEXT_WARPS = 4
CONTEXT_STAGES = 3
PREFETCH = 4
"""States, or a beam's own tokens, whose loads the merge kernel has in flight together."""


def most_splits(tokens: int) -> int:
    """Splits of the context that has the most of them, among those of up to ``tokens`` tokens."""
    return max(ceil_div(min(tokens, limit), size) for limit, size in _SPLITS)


def _launch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    ctx_len: torch.Tensor,
    tiles: RowTiles,
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
    across: bool | None,
) -> None:
    rows, q_heads, head_dim = q.shape
    kv_heads = k_cache.shape[1]
    num_tiles = tiles.rows.shape[0]
    if rows == 0 or num_tiles == 0:
        return
    if across is None:
        # Of full tiles: a bucket has room for many requests, and few of its tiles are used.
        across = ceil_div(rows, tile_rows) * kv_heads < FULL_CHIP
    splits = most_splits(page_table.shape[1] * page_size) if across else 1
    partial = torch.empty(splits, rows, q_heads, head_dim, dtype=torch.float32, device=q.device)
    peaks, totals = torch.empty(2, splits, rows, q_heads, dtype=torch.float32, device=q.device)
    quantised = k_cache.element_size() == 1
    log2_scale = scale * LOG2E * (k_scale if quantised else 1.0)
    value_scale = v_scale if quantised else 1.0
    block_d = max(16, next_power_of_2(head_dim))
    group_block = next_power_of_2(q_heads // kv_heads)
    k_tiles, v_tiles, descriptor = cache_arguments(k_cache, v_cache, page_size, KV_TILE)
    together = min(ceil_div(AT_ONCE, kv_heads), num_tiles * splits) if across else num_tiles
    context_kernel[(kv_heads, together)](
        q,
        k_tiles,
        v_tiles,
        page_table,
        ctx_len,
        *tiles,
        partial,
        peaks,
        totals,
        log2_scale,
        page_table.stride(0),
        k_cache.stride(0),
        rows,
        ctx_len.shape[0],
        num_tiles,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        GROUP_BLOCK=group_block,
        TILE_ROWS=tile_rows,
        PAGE_SIZE=page_size,
        KV_TILE=KV_TILE,
        SPLIT=SPLIT_TOKENS,
        ACROSS=across,
        REQUEST_BLOCK=max(64, next_power_of_2(ctx_len.shape[0])),
        TILE_BLOCK=max(128, next_power_of_2(num_tiles)),
        DESCRIPTOR=descriptor,
        num_warps=CONTEXT_WARPS,
        num_stages=CONTEXT_STAGES,
        **overlap(),
    )
    merge_kernel[(num_tiles, tile_rows)](
        q,
        k_cache,
        v_cache,
        ctx_len,
        *tiles,
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
        rows,
        ABSMAX_FLOOR,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        HEAD_BLOCK=next_power_of_2(q_heads),
        SPLIT=SPLIT_TOKENS,
        ACROSS=across,
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
    tiles: RowTiles,
    tile_rows: int,
    beam_base: int,
    beam_capacity: int,
    step: int,
    ancestors: torch.Tensor,
    scale: float,
    k_scale: float,
    v_scale: float,
    *,
    across: bool | None = None,
) -> torch.Tensor:
    """:func:`flashrec.kernels.decode_attention.shared_prefix_attention`; ``q`` contiguous.

    ``across`` forces or forbids parallel splits, for the tests that show that both give the same bits.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _launch(
        q,
        k_cache,
        v_cache,
        page_table,
        page_size,
        ctx_len,
        tiles,
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
        across,
    )
    return out


def shared_prefix_attention_quant_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    ctx_len: torch.Tensor,
    tiles: RowTiles,
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
        ctx_len,
        tiles,
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
        None,
    )
    return codes, out_scale
