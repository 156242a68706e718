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
from flashrec.runtime.prefill_graph import PrefillGraphs
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


@dataclass(frozen=True, slots=True, eq=False)
class PassTokens:
    """The flat tokens of a pass, int32 [T] on the device: ids, positions and pool slots."""

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor


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
        graphs: PrefillGraphs | None,
    ) -> None:
        self.model = model
        self.attention = attention
        self.ops = ops
        self.page_size = page_size
        self.tile_rows = tile_rows
        self.max_tokens = max_tokens
        self.profiler = profiler
        self.graphs = graphs

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
        arrays = [self._segment(members[seg.member], seg) for seg in segments]
        tokens = PassTokens(*upload(np.concatenate(arrays, axis=1), device).unbind(0))
        lengths = [seg.end - seg.start for seg in segments]
        meta = self._meta(members, segments, lengths, tokens, page_table)
        last = [
            (offset - 1, seg.member)
            for offset, seg in zip(np.cumsum(lengths).tolist(), segments, strict=True)
            if seg.end == members[seg.member].length
        ]
        rows, owner = upload(np.array(last, dtype=np.int64).reshape(-1, 2).T.copy(), device)
        if self.graphs is not None and self.graphs.holds(sum(lengths), len(segments)):
            out[owner] = self.graphs.run(tokens.ids, tokens.positions, tokens.slots, rows, meta)
            return
        batch = ForwardBatch(tokens.positions, tokens.slots, self.attention.prefill(meta), self.ops)
        hidden, residual = self.model.forward(tokens.ids, batch)
        if last:
            out[owner] = self.model.final_norm(hidden[rows], residual[rows], batch)

    def _meta(
        self,
        members: Sequence[Member],
        segments: list[Segment],
        lengths: list[int],
        tokens: PassTokens,
        page_table: torch.Tensor,
    ) -> PrefillMeta:
        device = page_table.device
        ends = np.array([seg.end for seg in segments], dtype=np.int32)
        owners = upload(np.array([seg.member for seg in segments]), device)
        return PrefillMeta(
            query_lens=lengths,
            kv_lens=ends.tolist(),
            pages=[members[seg.member].pages for seg in segments],
            kv_len=upload(ends, device),
            positions=tokens.positions,
            page_table=page_table[owners],
            tiles=RowTiles(*(upload(part.numpy(), device) for part in row_tiles(lengths, self.tile_rows))),
        )

    def _segment(self, member: Member, seg: Segment) -> NDArray[np.int32]:
        """Token ids, positions and slots, int32 [3, length]."""
        positions = np.arange(seg.start, seg.end, dtype=np.int32)
        pages = np.asarray(member.pages, dtype=np.int32)[positions // self.page_size]
        slots = pages * np.int32(self.page_size) + positions % np.int32(self.page_size)
        return np.stack((member.tokens[seg.start : seg.end], positions, slots))
