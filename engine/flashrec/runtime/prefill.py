"""Ragged prefill of what the prefix cache does not hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from flashrec.attention.base import AttentionBackend, PrefillMeta
from flashrec.batch import Ends, ForwardBatch
from flashrec.kernels.ops import Ops
from flashrec.kvcache.pool import page_table
from flashrec.models.base import CausalLM
from flashrec.profiler import Profiler
from flashrec.runtime.ledger import SlotPositions
from flashrec.runtime.member import Member
from flashrec.runtime.prefill_graph import PrefillGraphs
from flashrec.transfer import upload


class Segment(NamedTuple):
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
        positions: SlotPositions | None,
    ) -> None:
        self.model = model
        self.attention = attention
        self.ops = ops
        self.page_size = page_size
        self.max_tokens = max_tokens
        self.profiler = profiler
        self.graphs = graphs
        self.positions = positions

    def run(self, members: Sequence[Member], out: torch.Tensor) -> None:
        """Store K and V of every uncached token, and write the head's input [members, H] to ``out``."""
        cached, lengths = [member.cached for member in members], [member.length for member in members]
        for segments in chunks(cached, lengths, self.max_tokens):
            self.profiler.on_forward("prefill")
            self._pass(members, segments, out)

    def _pass(self, members: Sequence[Member], segments: list[Segment], out: torch.Tensor) -> None:
        tokens, meta = lay_out(members, segments, self.page_size)
        # Of the prompts in a pass only the last may go on in the next: those before it end here, in order.
        first = segments[0].member
        place = slice(first, first + len(meta.ends))
        if self.positions is not None:
            _, used, slots = upload(tokens, out.device)
            self.positions.note(slots, used)
        if self.graphs is not None and self.graphs.holds(tokens.shape[1], len(segments)):
            out[place] = self.graphs.run(tokens, meta)
            return
        out[place] = self._uncaptured(tokens, meta)

    def _uncaptured(self, tokens: NDArray[np.int32], meta: PrefillMeta) -> torch.Tensor:
        device = self.model.lm_head().device
        ids, positions, slots = upload(tokens, device)
        ends = Ends(upload(meta.ends, device), self.attention.prefill_ends(meta))
        batch = ForwardBatch(positions, slots, self.attention.prefill(meta), self.ops, ends)
        hidden, residual = self.model.forward(ids, batch)
        return self.model.final_norm(hidden, residual, batch)

    @torch.inference_mode()
    def warm_up(self, requests: int) -> None:
        """Launch passes without a graph, so that no request waits until what they launch is compiled.

        Products of a prompt's last token alone are tiled by the number of prompts: :func:`warm_up_counts`, one token
        each, whose keys and values go to the scratch page. Attention in tall tiles is not among it: comparing it with
        the other kernel at construction compiles that one.
        """
        for count in warm_up_counts(requests):
            lengths = [1] * count
            nothing = np.zeros((3, count), dtype=np.int32)
            table = np.zeros((count, 1), dtype=np.int32)
            ends = np.arange(count, dtype=np.int32)
            self._uncaptured(nothing, PrefillMeta(lengths, lengths, table, nothing[1], ends))


def warm_up_counts(requests: int) -> list[int]:
    """Numbers of prompts, up to ``requests``, whose products are tiled in every way that any number's are: powers of
    two, and from 128 on quarters between them."""
    powers = [1 << power for power in range(requests.bit_length())]
    quarters = {base + base * part // 4 for base in powers if base >= 128 for part in range(4)}
    return sorted({count for count in {*powers, *quarters} if count < requests} | {requests})


def lay_out(
    members: Sequence[Member], segments: Sequence[Segment], page_size: int
) -> tuple[NDArray[np.int32], PrefillMeta]:
    """A pass as arrays: token ids, positions and slots, int32 [3, T], and what its attention is told."""
    query_lens, kv_lens, ends, pages = [], [], [], []
    ids, positions, firsts = [], [], []
    written: list[int] = []
    total = 0
    for member, start, end in segments:
        owner = members[member]
        query_lens.append(end - start)
        kv_lens.append(end)
        total += end - start
        if end == owner.length:
            ends.append(total - 1)
        ids.append(owner.tokens[start:end])
        positions.append(np.arange(start, end, dtype=np.int32))
        pages.append(owner.pages[: -(-end // page_size)])
        firsts.append(len(written) * page_size + start % page_size)
        written += pages[-1][start // page_size :]
    # The slots of all pages that the pass writes to, in a row: a segment's begin at its ``firsts``.
    slots = np.add.outer(np.array(written, dtype=np.int32) * page_size, np.arange(page_size, dtype=np.int32)).ravel()
    tokens = np.empty((3, total), dtype=np.int32)
    np.concatenate(ids, out=tokens[0])
    np.concatenate(positions, out=tokens[1])
    runs = [slots[first : first + length] for first, length in zip(firsts, query_lens, strict=True)]
    np.concatenate(runs, out=tokens[2])
    meta = PrefillMeta(query_lens, kv_lens, page_table(pages), tokens[1], np.array(ends, dtype=np.int32))
    return tokens, meta
