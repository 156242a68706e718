"""The static device tensors of a row bucket, and how a wave is laid out in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from flashrec.kernels.decode_work import PIECE_FIELDS, DecodeWork, most_pieces, work_tables
from flashrec.kernels.tiles import RowTiles, tile_table
from flashrec.kvcache.pool import page_table
from flashrec.runtime.member import Member
from flashrec.search.expand import Sampling, Spans
from flashrec.transfer import StaticBlock, overwrite


@dataclass(frozen=True, slots=True)
class Bucket:
    """A size that decode programs exist for: at most ``rows`` beams of at most ``requests`` requests."""

    rows: int
    requests: int


def row_buckets(max_rows: int, max_requests: int) -> list[Bucket]:
    """Powers of two, quarters between them from 64 rows and eighths from 1,024, up to ``max_rows``.

    A bucket has room for one request per four rows: those that it does not serve cost empty programs of attention's
    merge kernel, and a wave of many narrow beams is rare enough to take a larger bucket.
    """
    sizes = {1, 2, 4, 8, 16, 32, 48}
    base = 64
    while base < max_rows:
        parts = 4 if base < 1024 else 8
        sizes.update(base + base * part // parts for part in range(parts))
        base *= 2
    rows = sorted({size for size in sizes if size < max_rows} | {max_rows})
    return [Bucket(size, min(max_requests, max(1, size // 4))) for size in rows]


def bucket_of(rows: int, requests: int, buckets: Sequence[Bucket]) -> Bucket:
    """The smallest bucket that holds a wave; the caller has checked that there is one."""
    return next(bucket for bucket in buckets if bucket.rows >= rows and bucket.requests >= requests)


@dataclass(frozen=True, slots=True, eq=False)
class WaveLayout:
    """Host side of a loaded wave: ``widths`` of its requests, the ``starts`` of their rows, and how many
    ``pages`` of the table hold its longest prompt."""

    widths: tuple[int, ...]
    starts: tuple[int, ...]
    pages: int

    @property
    def spans(self) -> list[tuple[int, int]]:
        return list(zip(self.starts, self.widths, strict=True))


class DecodeBuffers:
    """Tensors of one bucket, for ``passes`` decode passes and beams at most ``max_width`` wide.

    ``page_table`` int32 [requests, pages]; ``context_len`` int32 [requests]; ``row_request`` int64 [rows]; ``work`` the
    attention's, over contexts of up to ``context`` tokens;
    ``first`` and ``later`` int32 [4, requests], the span tables of the first selection (from one row per
    request) and of the others; ``ancestors`` int32 [passes, rows]; ``head_input`` [requests, hidden], the
    prompt's last hidden state. Rows and requests beyond the wave's are inert: they point at the scratch
    page and lie in no span.
    """

    def __init__(
        self,
        bucket: Bucket,
        *,
        pages: int,
        passes: int,
        max_width: int,
        tile_rows: int,
        kv_heads: int,
        context: int,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        rows, requests = bucket.rows, bucket.requests
        tiles = rows // tile_rows + requests
        self.rows = rows
        self.requests = requests
        self.tile_rows = tile_rows
        self.kv_heads = kv_heads
        self.max_width = min(max_width, rows)
        # The scratch page is page 0, so what a wave does not fill points at it.
        self._block = StaticBlock(
            {
                "page_table": (requests, pages),
                "context_len": (requests,),
                "row_request": (rows,),
                "first": (4, requests),
                "later": (4, requests),
                "tiles": (3, tiles),
                "states": (tiles + 1,),
                "pieces": (most_pieces(tiles, kv_heads, context), PIECE_FIELDS),
            },
            device,
        )
        self.page_table = self._block["page_table"]
        self.context_len = self._block["context_len"]
        self.first, self.later = self._block["first"], self._block["later"]
        tensors = RowTiles(*self._block["tiles"].unbind(0)), self._block["states"], self._block["pieces"]
        self.work = DecodeWork(*tensors)
        self.row_request = torch.zeros(rows, dtype=torch.int64, device=device)
        self.request_index = torch.arange(requests, device=device)
        self.inverse_temperature = torch.zeros(requests, device=device)
        self.seed = torch.zeros(requests, dtype=torch.int64, device=device)
        self.ancestors = torch.zeros(max(passes, 1), rows, dtype=torch.int32, device=device)
        self.row_index = torch.arange(rows, dtype=torch.int32, device=device)
        self.head_input = torch.zeros(requests, hidden, dtype=dtype, device=device)

    def load(self, members: Sequence[Member]) -> WaveLayout:
        """Write a wave's layout, overwriting every entry of the one before it."""
        widths = [member.width for member in members]
        starts = [end - width for end, width in zip(accumulate(widths), widths, strict=True)]
        requests = range(len(members))
        pages = page_table([member.pages for member in members])
        lengths = [member.length for member in members]
        tiles = tile_table(widths, self.tile_rows, len(self.work.tiles.rows))
        states, pieces = work_tables(tiles, lengths, self.kv_heads)
        self._block.write(
            {
                "page_table": pages,
                "context_len": np.array(lengths),
                "row_request": np.array(requests).repeat(widths),
                "first": np.array((requests, [1] * len(members), starts, widths)),
                "later": np.array((starts, widths, starts, widths)),
                "tiles": tiles,
                "states": states,
                "pieces": pieces,
            }
        )
        self.row_request.copy_(self._block["row_request"])
        # A kernel on a GPU stops at a request's length; the CPU reference walks the table's width.
        width = (pages if self.page_table.device.type == "cpu" else self.page_table).shape[1]
        return WaveLayout(tuple(widths), tuple(starts), width)

    def first_spans(self, layout: WaveLayout) -> Spans:
        """From one row per request to the wave's rows."""
        source = [(index, 1) for index in range(len(layout.widths))]
        return Spans(source, layout.spans, self.first, self.request_index, self.rows, source_width=1)

    def later_spans(self, layout: WaveLayout) -> Spans:
        """From the wave's rows to themselves."""
        return Spans(layout.spans, layout.spans, self.later, self.row_request, self.rows, source_width=self.max_width)

    def sampling(self, members: Sequence[Member]) -> Sampling:
        """Temperatures and seeds of a loaded wave's requests."""
        heat = np.zeros(self.requests, dtype=np.float32)
        seeds = np.zeros(self.requests, dtype=np.int64)
        for index, member in enumerate(members):
            request = member.request
            heat[index] = 1.0 / request.temperature if request.temperature > 0 else 0.0
            seeds[index] = request.seed or 0
        overwrite(self.inverse_temperature, heat)
        overwrite(self.seed, seeds)
        return Sampling(self.inverse_temperature, self.seed)
