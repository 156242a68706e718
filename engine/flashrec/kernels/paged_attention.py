"""Tile attention over the paged pool in plain PyTorch: the arithmetic that both attention references share.

K and V are read in tiles of a fixed size, in order, with an online softmax. A tile that is wholly masked for
a row leaves that row's state untouched bit for bit, so a row's result depends on its own K and V alone.
"""

from __future__ import annotations

import torch

from flashrec.kernels.quantize import wide
from flashrec.kernels.tiles import RowTiles

KV_TILE = 64
"""Tokens of K and V in one step of the online softmax, in the references and in the Triton kernels.

Pages of a multiple of this let the copy engine fetch whole tiles: H200, 2026-11-29, causal 8 x 2,465: 456 us with
pages of 64, 732 with pages of 16; FlashInfer's FA3 on the same data 471, cuDNN on contiguous K and V 384."""


class SoftmaxState:
    """Running maximum, sum of exponentials and weighted sum of V for ``[batch, rows]`` queries."""

    def __init__(self, queries: torch.Tensor) -> None:
        """For ``queries[batch, rows, head_dim]``, in their dtype and on their device."""
        self.maximum = torch.full_like(queries[..., :1], -torch.inf)
        self.total = torch.zeros_like(self.maximum)
        self.weighted = torch.zeros_like(queries)

    def update(self, logits: torch.Tensor, v: torch.Tensor) -> None:
        """Folds in ``logits[batch, rows, kv]`` (-inf where masked) with ``v[batch, kv, head_dim]``."""
        maximum = torch.maximum(self.maximum, logits.amax(dim=-1, keepdim=True))
        anchor = maximum.nan_to_num(neginf=0.0)
        kept = torch.exp(self.maximum - anchor)
        weights = torch.exp(logits - anchor)
        self.total = self.total * kept + weights.sum(dim=-1, keepdim=True)
        self.weighted = self.weighted * kept + torch.bmm(weights, v)
        self.maximum = maximum

    def update_own(self, logits: torch.Tensor, v: torch.Tensor) -> None:
        """Folds in one token of each row's own: ``logits[batch, rows, 1]``, ``v[batch, rows, head_dim]``."""
        maximum = torch.maximum(self.maximum, logits)
        kept, weight = torch.exp(self.maximum - maximum), torch.exp(logits - maximum)
        self.total = self.total * kept + weight
        self.weighted = self.weighted * kept + weight * v
        self.maximum = maximum

    def result(self) -> torch.Tensor:
        """The attention output [batch, rows, head_dim]; zeros for a row that saw no token."""
        return self.weighted / self.total.masked_fill(self.total == 0.0, 1.0)


def gather_rows(tiles: RowTiles, tile_rows: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row numbers [tiles, tile_rows] of each tile, and which of them exist. Absent rows read row 0."""
    lane = torch.arange(tile_rows, device=tiles.row0.device)
    valid = lane < tiles.rows.unsqueeze(1)
    rows = torch.where(valid, tiles.row0.long().unsqueeze(1) + lane, 0)
    return rows.clamp(max=max(num_rows - 1, 0)), valid


def fold_heads(x: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """[tiles, rows, hq, d] -> [tiles * hk, rows * group, d]: the queries that share one K/V head."""
    tiles, rows, heads, dim = x.shape
    grouped = x.reshape(tiles, rows, num_kv_heads, heads // num_kv_heads, dim)
    return grouped.transpose(1, 2).reshape(tiles * num_kv_heads, -1, dim)


def unfold_heads(x: torch.Tensor, tiles: int, rows: int) -> torch.Tensor:
    """The inverse of :func:`fold_heads`: [tiles, rows, hq, d]."""
    grouped = x.reshape(tiles, -1, rows, x.shape[1] // rows, x.shape[2])
    return grouped.transpose(1, 2).reshape(tiles, rows, -1, x.shape[2])


def scatter_rows(values: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor, num_rows: int) -> torch.Tensor:
    """[tiles, tile_rows, ...] -> [num_rows, ...]; rows that no tile covers are zero."""
    out = values.new_zeros(num_rows + 1, *values.shape[2:])
    out[torch.where(valid, rows, num_rows).flatten()] = values.flatten(0, 1)
    return out[:num_rows]


def read_kv_tile(cache: torch.Tensor, slots: torch.Tensor, valid: torch.Tensor, scale: float) -> torch.Tensor:
    """``cache[num_slots, hk, d]`` at ``slots[batch, kv]``: [batch * hk, kv, d], wide.

    Invalid slots read as zero. An FP8 value is multiplied by ``scale``.
    """
    values = wide(cache[torch.where(valid, slots, 0)])
    if cache.dtype.itemsize == 1:
        values = values * scale
    return values.masked_fill(~valid[..., None, None], 0.0).transpose(1, 2).flatten(0, 1)


def context_state(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    tiles: RowTiles,
    kv_len: torch.Tensor,
    limits: torch.Tensor | None,
    scale: float,
    k_scale: float,
    v_scale: float,
) -> SoftmaxState:
    """Attention state of query tiles ``q[tiles, rows, hq, d]`` over their requests' pages.

    A row sees the tokens before ``kv_len[request]`` (int32 [R]) and, if ``limits`` is given
    (int [tiles, rows]), before its own limit: causal attention. The number of K/V tiles comes from
    ``page_table[R, max_pages]``'s width, never from a tensor's value.
    """
    rows, heads = q.shape[1:3]
    num_kv_heads = k_cache.shape[1]
    group = heads // num_kv_heads
    folded = wide(fold_heads(q, num_kv_heads))
    state = SoftmaxState(folded)
    pages = page_table[tiles.request.long()].long()
    lengths = kv_len[tiles.request.long()].unsqueeze(1)
    for start in range(0, page_table.shape[1] * page_size, KV_TILE):
        position = torch.arange(start, start + KV_TILE, device=q.device)
        page = (position // page_size).clamp(max=page_table.shape[1] - 1)
        slots = pages[:, page] * page_size + position % page_size
        valid = position < lengths
        k = read_kv_tile(k_cache, slots, valid, k_scale)
        v = read_kv_tile(v_cache, slots, valid, v_scale)
        seen = valid.unsqueeze(1).expand(-1, rows, -1)
        if limits is not None:
            seen = seen & (position < limits.unsqueeze(-1))
        mask = seen.repeat_interleave(group, dim=1).repeat_interleave(num_kv_heads, dim=0)
        logits = (torch.bmm(folded, k.transpose(1, 2)) * scale).masked_fill(~mask, -torch.inf)
        state.update(logits, v)
    return state
