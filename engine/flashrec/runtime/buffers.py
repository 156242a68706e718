"""The static device tensors of a row bucket, and how a wave is laid out in them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from flashrec.kernels.tiles import RowTiles, row_tiles
from flashrec.kvcache.pool import SCRATCH_PAGE
from flashrec.runtime.member import Member
from flashrec.search.expand import Sampling, Spans
from flashrec.transfer import overwrite


def row_buckets(max_rows: int) -> list[int]:
    """Row counts that decode programs exist for: powers of two, quarters between them from 64 and eighths from 1,024.

    From 128 rows on they are multiples of a GEMM's tile, so the padding is rows that a tile would compute anyway.
    """
    sizes = {1, 2, 4, 8, 16, 32, 48}
    base = 64
    while base < max_rows:
        parts = 4 if base < 1024 else 8
        sizes.update(base + base * part // parts for part in range(parts))
        base *= 2
    return sorted({size for size in sizes if size < max_rows} | {max_rows})


def bucket_of(rows: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds ``rows``."""
    return buckets[bisect_left(buckets, rows)]


@dataclass(frozen=True, slots=True, eq=False)
class WaveLayout:
    """Host side of a loaded wave: ``widths`` of its requests and the ``starts`` of their rows."""

    widths: tuple[int, ...]
    starts: tuple[int, ...]
    pages: int

    @property
    def spans(self) -> list[tuple[int, int]]:
        return list(zip(self.starts, self.widths, strict=True))


class DecodeBuffers:
    """Tensors of one bucket of ``rows`` beams of at most ``requests`` requests, ``passes`` decode passes.

    ``page_table`` int32 [requests, pages]; ``context_len`` int32 [requests]; ``row_request`` int64 [rows];
    ``first`` and ``later`` int32 [4, requests], the span tables of the first selection (from one row per
    request) and of the others; ``ancestors`` int32 [passes, rows]; ``head_input`` [requests, hidden], the
    prompt's last hidden state. Rows and requests beyond the wave's are inert: they point at the scratch
    page and lie in no span.
    """

    def __init__(
        self,
        *,
        rows: int,
        requests: int,
        pages: int,
        passes: int,
        tile_rows: int,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def zeros(*shape: int, kind: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        self.rows = rows
        self.requests = requests
        self.tile_rows = tile_rows
        self.page_table = zeros(requests, pages)
        self.context_len = zeros(requests)
        self.row_request = zeros(rows, kind=torch.int64)
        self.request_index = torch.arange(requests, device=device)
        self.first = zeros(4, requests)
        self.later = zeros(4, requests)
        self.inverse_temperature = zeros(requests, kind=torch.float32)
        self.seed = zeros(requests, kind=torch.int64)
        tiles = rows // tile_rows + requests
        self.tiles = RowTiles(zeros(tiles), zeros(tiles), zeros(tiles))
        self.ancestors = zeros(max(passes, 1), rows)
        self.row_index = torch.arange(rows, dtype=torch.int32, device=device)
        self.head_input = zeros(requests, hidden, kind=dtype)

    def load(self, members: Sequence[Member]) -> WaveLayout:
        """Write a wave's layout, overwriting every entry of the one before it."""
        widths = np.array([member.width for member in members])
        starts = np.cumsum(widths) - widths
        count = len(members)
        pages = np.full(self.page_table.shape, SCRATCH_PAGE, dtype=np.int32)
        for index, member in enumerate(members):
            pages[index, : len(member.pages)] = member.pages
        lengths = np.zeros(self.requests, dtype=np.int32)
        lengths[:count] = [member.length for member in members]
        owners = np.zeros(self.rows, dtype=np.int64)
        owners[: widths.sum()] = np.repeat(np.arange(count), widths)
        first = np.zeros((4, self.requests), dtype=np.int32)
        first[:, :count] = np.arange(count), np.ones(count), starts, widths
        later = first.copy()
        later[:2, :count] = starts, widths
        heat = np.zeros(self.requests, dtype=np.float32)
        seeds = np.zeros(self.requests, dtype=np.int64)
        for index, member in enumerate(members):
            request = member.request
            heat[index] = 1.0 / request.temperature if request.temperature > 0 else 0.0
            seeds[index] = request.seed or 0
        for target, source in (
            (self.page_table, pages),
            (self.context_len, lengths),
            (self.row_request, owners),
            (self.first, first),
            (self.later, later),
            (self.inverse_temperature, heat),
            (self.seed, seeds),
        ):
            overwrite(target, source)
        for target, part in zip(
            self.tiles, row_tiles(widths.tolist(), self.tile_rows, len(self.tiles.rows)), strict=True
        ):
            overwrite(target, part.numpy())
        # A kernel on a GPU stops at a request's length; the CPU reference walks the table's width.
        on_cpu = self.page_table.device.type == "cpu"
        width = max(len(member.pages) for member in members) if on_cpu else self.page_table.shape[1]
        return WaveLayout(tuple(widths.tolist()), tuple(starts.tolist()), width)

    def first_spans(self, layout: WaveLayout) -> Spans:
        """From one row per request to the wave's rows."""
        source = [(index, 1) for index in range(len(layout.widths))]
        return Spans(source, layout.spans, self.first, self.request_index, self.rows, source_width=1)

    def later_spans(self, layout: WaveLayout) -> Spans:
        """From the wave's rows to themselves."""
        return Spans(layout.spans, layout.spans, self.later, self.row_request, self.rows)

    def sampling(self) -> Sampling:
        return Sampling(self.inverse_temperature, self.seed)
