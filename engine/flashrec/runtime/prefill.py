"""Ragged prefill of what the prefix cache does not hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from flashrec.attention.base import AttentionBackend, PrefillMeta
from flashrec.batch import ForwardBatch
from flashrec.kernels.ops import Ops
from flashrec.kernels.tiles import RowTiles, row_tiles
from flashrec.models.base import CausalLM
from flashrec.profiler import Profiler
from flashrec.runtime.member import Member
from flashrec.transfer import upload


@dataclass(frozen=True, slots=True)
class Segment:
    """Prompt tokens ``start .. end - 1`` of one member, in one pass."""

    member: int
    start: int
    end: int


def chunks(cached: Sequence[int], lengths: Sequence[int], limit: int) -> Iterator[list[Segment]]:
    """Cut the uncached part of every prompt into passes of at most ``limit`` tokens, in order."""
    segments: list[Segment] = []
    room = limit
    for member, (start, length) in enumerate(zip(cached, lengths, strict=True)):
        while start < length:
            taken = min(length - start, room)
            segments.append(Segment(member, start, start + taken))
            start, room = start + taken, room - taken
            if room == 0:
                yield segments
                segments, room = [], limit
    if segments:
        yield segments


class Prefill:
    """Runs the prompt passes of a wave and collects each prompt's last hidden state."""

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        ops: Ops,
        *,
        page_size: int,
        tile_rows: int,
        max_tokens: int,
        profiler: Profiler,
    ) -> None:
        self.model = model
        self.attention = attention
        self.ops = ops
        self.page_size = page_size
        self.tile_rows = tile_rows
        self.max_tokens = max_tokens
        self.profiler = profiler

    def run(
        self, members: Sequence[Member], page_table: torch.Tensor, cached: Sequence[int], out: torch.Tensor
    ) -> None:
        """Store K and V of every uncached token, and write the head's input [members, H] to ``out``."""
        for segments in chunks(cached, [member.length for member in members], self.max_tokens):
            self.profiler.on_forward("prefill")
            self._pass(members, segments, page_table, out)

    def _pass(
        self, members: Sequence[Member], segments: list[Segment], page_table: torch.Tensor, out: torch.Tensor
    ) -> None:
        device = page_table.device
        tokens, positions, slots = (
            upload(np.concatenate(parts), device)
            for parts in zip(*(self._segment(members[seg.member], seg) for seg in segments), strict=True)
        )
        lengths = [seg.end - seg.start for seg in segments]
        owners = upload(np.array([seg.member for seg in segments]), device)
        ends = np.array([seg.end for seg in segments], dtype=np.int32)
        tiles = row_tiles(lengths, self.tile_rows)
        meta = PrefillMeta(
            query_lens=lengths,
            kv_lens=ends.tolist(),
            pages=[members[seg.member].pages for seg in segments],
            kv_len=upload(ends, device),
            positions=positions,
            page_table=page_table[owners],
            tiles=RowTiles(*(upload(part.numpy(), device) for part in tiles)),
        )
        batch = ForwardBatch(positions, slots, self.attention.prefill(meta), self.ops)
        hidden, residual = self.model.forward(tokens, batch)
        last = [
            (offset - 1, seg.member)
            for offset, seg in zip(np.cumsum(lengths).tolist(), segments, strict=True)
            if seg.end == members[seg.member].length
        ]
        if last:
            rows, owner = upload(np.array(last).T.copy(), device)
            out[owner] = self.model.final_norm(hidden[rows], residual[rows], batch)

    def _segment(self, member: Member, seg: Segment) -> tuple[NDArray[np.int32], ...]:
        positions = np.arange(seg.start, seg.end, dtype=np.int32)
        pages = np.asarray(member.pages, dtype=np.int32)[positions // self.page_size]
        slots = pages * np.int32(self.page_size) + positions % np.int32(self.page_size)
        return member.tokens[seg.start : seg.end], positions, slots
