"""How the programs of decode attention share a wave's contexts: in pieces, laid out on the host with the wave.

A context is cut into splits by its length alone, each with a softmax state from scratch, and the states are merged in
order. A piece is one split, whose state the next kernel merges, or a whole context, whose program merges as it goes.
Both perform the same operations in the same order, so which it is, a matter of how much work the wave has, leaves a
row's bits alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from flashrec.kernels.tiles import RowTiles, tile_table

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
"""(length that a context does not exceed, tokens of a split)."""
AT_ONCE = 2 * 132
"""Programs of the context kernel that an H200 holds at once; they take the pieces in turns."""
PIECE_FIELDS = 8
"""Integers of a piece: request, first row, rows, first token, the one after the last, tokens of a split, state; one
is unused, so that a piece is 32 bytes."""


class DecodeWork(NamedTuple):
    """``tiles`` of query rows, and the pieces of context that they attend to.

    ``pieces`` int32 [capacity, PIECE_FIELDS], longest first, of which ``states[-1]`` are used. ``states`` int32
    [num_tiles + 1]: those of tile ``t`` are number ``states[t] .. states[t + 1] - 1``, in the context's order.
    """

    tiles: RowTiles
    states: torch.Tensor
    pieces: torch.Tensor


def most_splits(tokens: int) -> int:
    """Splits of the context that has the most of them, among those of up to ``tokens`` tokens."""
    return max(-(-min(tokens, limit) // size) for limit, size in _SPLITS)


def split_sizes(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tokens of a split of each context."""
    limits, sizes = zip(*_SPLITS, strict=True)
    return np.array(sizes)[np.searchsorted(limits, lengths)]


def programs(kv_heads: int) -> int:
    """Programs that share the pieces of one K/V head."""
    return -(-AT_ONCE // kv_heads)


def most_pieces(num_tiles: int, kv_heads: int, tokens: int) -> int:
    """Pieces that ``num_tiles`` tiles have at most, over contexts of up to ``tokens`` tokens.

    A tile in several pieces has more than two programs' share of the work, so fewer than half as many tiles as there
    are programs do.
    """
    return num_tiles + min(num_tiles, (programs(kv_heads) - 1) // 2) * (most_splits(tokens) - 1)


def work_tables(
    tiles: NDArray[np.int32], lengths: Sequence[int], kv_heads: int, *, parallel: bool | None = None
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """``states`` and the used ``pieces`` of ``tiles`` (a :func:`flashrec.kernels.tiles.tile_table`).

    A tile's splits are pieces of their own where its context is more than twice what a program has to do on average:
    with fewer, longer pieces that program would be the last to end. ``parallel`` says it for all tiles instead.

    H200, 2026-12-03, us of a layer with single splits / whole contexts as pieces: 50 rows over 2,465 tokens 20 / 46,
    2 x 256 over 1,000 31 / 34, 3 x 256 over 1,000 45 / 36, 32 x 50 over 303 55 / 44; and the same with one of the
    contexts 5,000 tokens long: 74 / 107.
    """
    request, row0, rows = tiles.astype(np.int64)
    used = rows > 0
    context = np.where(used, np.array([*lengths, 0])[request], 0)
    size = split_sizes(context)
    share = 2 * context.sum() / programs(kv_heads)
    apart = context > share if parallel is None else np.full(len(context), parallel)
    count = np.where(apart & used, np.maximum(-(-context // size), 1), used)
    states = np.concatenate(([0], count.cumsum()))
    tile = np.arange(len(count)).repeat(count)
    number = np.arange(len(tile))
    begin = (number - states[tile]) * size[tile]
    end = np.where(apart[tile], np.minimum(begin + size[tile], context[tile]), context[tile])
    fields = (request[tile], row0[tile], rows[tile], begin, end, size[tile], number, np.zeros_like(number))
    longest_first = np.argsort(begin - end, kind="stable")
    return states.astype(np.int32), np.stack(fields, axis=1)[longest_first].astype(np.int32)


def decode_work(
    rows: Sequence[int],
    lengths: Sequence[int],
    tile_rows: int,
    kv_heads: int,
    *,
    spare: int = 0,
    parallel: bool | None = None,
    device: torch.device | None = None,
) -> DecodeWork:
    """The work of requests with ``rows`` query rows over contexts of ``lengths`` tokens, and ``spare`` empty tiles."""
    table = tile_table(rows, tile_rows)
    table = np.concatenate((table, np.zeros((3, spare), dtype=np.int32)), axis=1)
    states, pieces = (
        torch.from_numpy(part).to(device) for part in work_tables(table, lengths, kv_heads, parallel=parallel)
    )
    return DecodeWork(RowTiles(*torch.from_numpy(table).to(device).unbind(0)), states, pieces)
