"""The decode program of a catalog wave: every selection and every pass between them, on static buffers.

Nothing in it reads a tensor on the host, so the same code runs step by step or is captured as one graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from flashrec.attention.base import AttentionBackend, DecodeMeta
from flashrec.batch import ForwardBatch
from flashrec.kernels.ops import Ops
from flashrec.models.base import CausalLM
from flashrec.profiler import trace_range
from flashrec.runtime.buffers import DecodeBuffers, WaveLayout
from flashrec.runtime.ledger import Ledger, SlotPositions
from flashrec.search.expand import Expansion, Frontier, Sampling, Spans, select_expand
from flashrec.search.filters import FilterSet
from flashrec.search.levels import Level


@dataclass(frozen=True, slots=True, eq=False)
class Decoder:
    """What a decode pass needs beside a wave's buffers; ``positions`` only where a ledger is kept."""

    model: CausalLM
    attention: AttentionBackend
    ops: Ops
    beam_base: int
    positions: SlotPositions | None

    def forward(self, buffers: DecodeBuffers, tokens: torch.Tensor, stored: int, pages: int) -> torch.Tensor:
        """Pass number ``stored``: from the beams' newest ``tokens`` int32 [B] to the head's input [B, H]."""
        buffers.ancestors[stored] = buffers.row_index
        positions = buffers.context_len[buffers.row_request] + stored
        slots = buffers.row_index + (self.beam_base + stored * buffers.rows)
        if self.positions is not None:
            self.positions.note(slots, positions)
        meta = DecodeMeta(
            page_table=buffers.page_table[:, :pages],
            context_len=buffers.context_len,
            work=buffers.work,
            ancestors=buffers.ancestors,
            stored=stored + 1,
        )
        batch = ForwardBatch(positions, slots, self.attention.decode(meta), self.ops)
        hidden, residual = self.model.forward(tokens, batch)
        return self.model.final_norm(hidden, residual, batch)


def reorder_ancestors(buffers: DecodeBuffers, parent: torch.Tensor, stored: int) -> None:
    """After a selection, a row's earlier tokens are its parent's."""
    if stored:
        buffers.ancestors[:stored] = buffers.ancestors[:stored, parent.long()]


class CatalogProgram:
    """The search of one wave over a catalog's levels."""

    def __init__(self, decoder: Decoder, levels: Sequence[Level]) -> None:
        self.decoder = decoder
        self.levels = levels
        self.expand = select_expand(decoder.ops)

    @property
    def passes(self) -> int:
        """Decode passes of a wave: the first selection needs none, and neither do settled levels at the end."""
        return max((index for index, level in enumerate(self.levels) if not level.settled), default=0)

    def run(
        self,
        buffers: DecodeBuffers,
        layout: WaveLayout,
        filters: FilterSet | None,
        sampling: Sampling | None,
        ledger: Ledger | None,
    ) -> Frontier:
        """Search from ``buffers.head_input``; the final ``node`` of a valid row is its SID's rank."""

        def select(step: int, hidden: torch.Tensor | None, frontier: Frontier, spans: Spans) -> Expansion:
            level = self.levels[step]
            logits = self._logits(level, hidden, len(frontier.node))
            with trace_range("flashrec.expand"):
                expansion = self.expand(logits, level, frontier, spans, filters, sampling)
                reorder_ancestors(buffers, expansion.parent, step)
            if ledger is not None:
                self._record(ledger, step, expansion, logits, spans, frontier.valid)
            return expansion

        spans = buffers.later_spans(layout)
        expansion = select(0, buffers.head_input, self._root(buffers, sampling), buffers.first_spans(layout))
        for step in range(1, len(self.levels)):
            hidden = None
            if step <= self.passes:
                tokens = self._tokens(step - 1, expansion)
                hidden = self.decoder.forward(buffers, tokens, step - 1, layout.pages)
            expansion = select(step, hidden, expansion.frontier, spans)
        return expansion.frontier

    def _logits(self, level: Level, hidden: torch.Tensor | None, rows: int) -> torch.Tensor:
        """Logits [rows, W] from the head's input [rows, H]; of a settled level, which has none, any will do."""
        if hidden is None:
            return level.weight.new_zeros(rows, level.weight.shape[0])
        logits: torch.Tensor = self.decoder.ops.linear(hidden, level.weight)
        return logits

    def _tokens(self, step: int, expansion: Expansion) -> torch.Tensor:
        """The token ids int32 [B] that a selection emitted, 0 in rows without a hypothesis."""
        return torch.where(expansion.frontier.valid, self.levels[step].tokens[expansion.code.long()], 0)

    def _root(self, buffers: DecodeBuffers, sampling: Sampling | None) -> Frontier:
        """One hypothesis per request: the empty prefix, with score 0."""
        count, device = buffers.requests, buffers.head_input.device
        zero = torch.zeros(count, device=device)
        root = Frontier(
            node=torch.zeros(count, dtype=torch.int32, device=device),
            score=zero,
            valid=torch.ones(count, dtype=torch.bool, device=device),
        )
        return root if sampling is None else replace(root, phi=zero, noisy=zero)

    def _record(
        self,
        ledger: Ledger,
        step: int,
        expansion: Expansion,
        logits: torch.Tensor,
        spans: Spans,
        rows_valid: torch.Tensor,
    ) -> None:
        ledger.record(
            step,
            tokens=self._tokens(step, expansion),
            parents=expansion.parent,
            scores=expansion.frontier.score,
            valid=expansion.frontier.valid,
            logits=logits,
            rows=spans.request,
            rows_valid=rows_valid,
        )
