"""Ragged prefill of what the prefix cache does not hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from flashrec.attention.base import AttentionBackend, PrefillMeta
from flashrec.batch import Ends, ForwardBatch
from flashrec.kernels.ops import Ops
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


class Prefill:
    """Runs the prompt passes of a wave and collects each prompt's last hidden state."""

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        ops: Ops,
        *,
        page_size: int,
        max_tokens: int,
        profiler: Profiler,
        graphs: PrefillGraphs | None,
    ) -> None:
        self.model = model
        self.attention = attention
        self.ops = ops
        self.page_size = page_size
        self.max_tokens = max_tokens
        self.profiler = profiler
        self.graphs = graphs

    def run(self, members: Sequence[Member], cached: Sequence[int], out: torch.Tensor) -> None:
        """Store K and V of every uncached token, and write the head's input [members, H] to ``out``."""
        for segments in chunks(cached, [member.length for member in members], self.max_tokens):
            self.profiler.on_forward("prefill")
            self._pass(members, segments, out)

    def _pass(self, members: Sequence[Member], segments: list[Segment], out: torch.Tensor) -> None:
        tokens = np.concatenate([self._segment(members[seg.member], seg) for seg in segments], axis=1)
        lengths = [seg.end - seg.start for seg in segments]
        last = [
            (offset - 1, seg.member)
            for offset, seg in zip(np.cumsum(lengths).tolist(), segments, strict=True)
            if seg.end == members[seg.member].length
        ]
        rows, owners = np.array(last, dtype=np.int64).reshape(-1, 2).T.copy()
        meta = PrefillMeta(
            query_lens=lengths,
            kv_lens=[seg.end for seg in segments],
            pages=[members[seg.member].pages for seg in segments],
            positions=tokens[1],
            ends=rows,
        )
        # Prompts end in the order of the members, so a wave of one pass fills ``out`` from its start.
        place = slice(owners[0], owners[-1] + 1) if len(owners) else slice(0)
        if self.graphs is not None and self.graphs.holds(tokens.shape[1], len(segments)):
            out[place] = self.graphs.run(tokens, meta)
            return
        ids, positions, slots = upload(tokens, out.device)
        ends = Ends(upload(rows, out.device), self.attention.prefill_ends(meta))
        batch = ForwardBatch(positions, slots, self.attention.prefill(meta), self.ops, ends)
        hidden, residual = self.model.forward(ids, batch)
        out[place] = self.model.final_norm(hidden, residual, batch)

    def _segment(self, member: Member, seg: Segment) -> NDArray[np.int32]:
        """Token ids, positions and slots, int32 [3, length]."""
        positions = np.arange(seg.start, seg.end, dtype=np.int32)
        pages = np.asarray(member.pages, dtype=np.int32)[positions // self.page_size]
        slots = pages * np.int32(self.page_size) + positions % np.int32(self.page_size)
        return np.stack((member.tokens[seg.start : seg.end], positions, slots))
