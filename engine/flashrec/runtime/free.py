"""The decode program of a wave without a catalog."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashrec.profiler import trace_range
from flashrec.runtime.buffers import DecodeBuffers, WaveLayout
from flashrec.runtime.decode import Decoder, reorder_ancestors
from flashrec.runtime.member import Member
from flashrec.search.free import Bank, FreeSearch


class FreeProgram:
    """One :class:`~flashrec.search.free.FreeSearch` per request, on the wave's shared passes."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def run(self, buffers: DecodeBuffers, layout: WaveLayout, members: Sequence[Member]) -> list[Bank]:
        """The finished hypotheses of each request, not yet ranked."""
        device = buffers.head_input.device
        searches = [
            FreeSearch(
                width=member.width,
                steps=member.key.steps,
                stop_tokens=member.stop_tokens,
                length_penalty=member.request.length_penalty,
                semantics=member.request.semantics,
                device=device,
            )
            for member in members
        ]

        def select(step: int, hidden: torch.Tensor, sources: list[tuple[int, int]]) -> torch.Tensor:
            logits = self.decoder.ops.linear(hidden, self.decoder.model.lm_head())
            parent = torch.zeros(buffers.rows, dtype=torch.int32, device=device)
            tokens = torch.zeros(buffers.rows, dtype=torch.int32, device=device)
            with trace_range("flashrec.expand"):
                for search, (start, count), (to, width) in zip(searches, sources, layout.spans, strict=True):
                    origin, token = search.advance(logits[start : start + count])
                    parent[to : to + width] = origin + start
                    tokens[to : to + width] = token
                reorder_ancestors(buffers, parent, step)
            return tokens

        tokens = select(0, buffers.head_input, [(index, 1) for index in range(len(members))])
        for step in range(1, members[0].key.steps):
            hidden = self.decoder.forward(buffers, tokens, step - 1, layout.pages)
            tokens = select(step, hidden, layout.spans)
        return [search.bank for search in searches]
