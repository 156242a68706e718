"""The decode program of a wave without a catalog."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from flashrec.profiler import trace_range
from flashrec.runtime.buffers import DecodeBuffers, WaveLayout
from flashrec.runtime.decode import Decoder, reorder_ancestors
from flashrec.runtime.ledger import Ledger
from flashrec.runtime.member import Member
from flashrec.search.expand import Spans
from flashrec.search.free import Bank, FreeSearch


class FreeProgram:
    """One :class:`~flashrec.search.free.FreeSearch` per request, on the wave's shared passes."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    def run(
        self, buffers: DecodeBuffers, layout: WaveLayout, members: Sequence[Member], ledger: Ledger | None
    ) -> list[Bank]:
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

        def select(step: int, hidden: torch.Tensor, spans: Spans, rows: _Rows | None) -> _Rows:
            logits = self.decoder.ops.linear(hidden, self.decoder.model.lm_head())
            found = _Rows.empty(buffers.rows, device)
            with trace_range("flashrec.expand"):
                for search, (start, count), (to, width) in zip(searches, spans.source, spans.target, strict=True):
                    parent, token = search.advance(logits[start : start + count])
                    span = slice(to, to + width)
                    found.parents[span], found.tokens[span] = parent + start, token
                    found.scores[span], found.valid[span] = search.total, search.running
                reorder_ancestors(buffers, found.parents, step)
            if ledger is not None:
                before = spans.request >= 0 if rows is None else rows.valid
                ledger.record(step, **found._asdict(), logits=logits, rows=spans.request, rows_valid=before)
            return found

        found = select(0, buffers.head_input, buffers.first_spans(layout), None)
        for step in range(1, members[0].key.steps):
            hidden = self.decoder.forward(buffers, found.tokens, step - 1, layout.pages)
            found = select(step, hidden, buffers.later_spans(layout), found)
        return [search.bank for search in searches]


class _Rows(NamedTuple):
    """What a selection put into the wave's rows: ``tokens``, ``parents`` int32, ``scores`` float32 and ``valid`` bool,
    each [B]."""

    tokens: torch.Tensor
    parents: torch.Tensor
    scores: torch.Tensor
    valid: torch.Tensor

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> _Rows:
        integers = torch.zeros(2, rows, dtype=torch.int32, device=device)
        valid = torch.zeros(rows, dtype=torch.bool, device=device)
        return cls(integers[0], integers[1], torch.zeros(rows, device=device), valid)
