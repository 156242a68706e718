"""Captured prefill passes of few tokens, which launching kernel by kernel would bound.

One H200, Qwen3-1.7B shape, FP8, 2026-11-29: 2,465 tokens took 15.2 ms eagerly, of which the device worked 10;
303 tokens took 17.7 ms, of which it worked 3.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import torch

from flashrec.attention.base import AttentionBackend, PrefillMeta
from flashrec.batch import ForwardBatch
from flashrec.kernels.ops import Ops
from flashrec.kvcache.pool import SCRATCH_PAGE
from flashrec.models.base import CausalLM
from flashrec.runtime.graph import CapturedProgram

MAX_TOKENS = 4096
"""Above it the device is the bottleneck and padding to a bucket costs more than launching."""


def token_buckets(limit: int) -> list[int]:
    """Token counts that prefill graphs exist for: multiples of 64 up to 512, then of 128."""
    return [size for size in (*range(64, 512, 64), *range(512, limit + 1, 128)) if size <= limit]


class PrefillPass:
    """The static buffers and the graph of one token bucket."""

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        ops: Ops,
        *,
        tokens: int,
        requests: int,
        pages: int,
        memory: Any,
    ) -> None:
        device = model.lm_head().device
        self.inputs = torch.zeros(3, tokens, dtype=torch.int32, device=device)
        self.inputs[2] = SCRATCH_PAGE
        self.rows = torch.zeros(requests, dtype=torch.int64, device=device)
        self.attention = attention.static_prefill(tokens, requests, pages)
        ids, positions, slots = self.inputs
        batch = ForwardBatch(positions, slots, self.attention.attend, ops)

        def run() -> torch.Tensor:
            hidden, residual = model.forward(ids, batch)
            return model.final_norm(hidden[self.rows], residual[self.rows], batch)

        self._program = CapturedProgram(run, f"the prefill of {tokens} tokens", memory)

    def run(
        self, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, meta: PrefillMeta
    ) -> torch.Tensor:
        """The head's input [prompts that end in the pass, H], valid until the next replay."""
        count = ids.shape[0]
        # Tokens beyond the pass's write to the scratch page, wherever an earlier pass had pointed them.
        self.inputs[2, count:] = SCRATCH_PAGE
        self.inputs[0, :count], self.inputs[1, :count], self.inputs[2, :count] = ids, positions, slots
        self.rows[: rows.shape[0]] = rows
        self.attention.plan(meta)
        return self._program.replay()[: rows.shape[0]]


class PrefillGraphs:
    """The captured passes of all token buckets."""

    def __init__(
        self, model: CausalLM, attention: AttentionBackend, ops: Ops, *, limit: int, requests: int, pages: int
    ) -> None:
        self.buckets = token_buckets(min(limit, MAX_TOKENS))
        self.requests = requests
        memory = torch.cuda.graph_pool_handle()
        self._passes = {
            tokens: PrefillPass(model, attention, ops, tokens=tokens, requests=requests, pages=pages, memory=memory)
            for tokens in reversed(self.buckets)
        }

    def holds(self, tokens: int, requests: int) -> bool:
        """Whether a pass of this size runs from a graph."""
        return tokens <= self.buckets[-1] and requests <= self.requests

    def run(
        self, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor, meta: PrefillMeta
    ) -> torch.Tensor:
        """Run a pass; see :meth:`PrefillPass.run`."""
        tokens = self.buckets[bisect_left(self.buckets, ids.shape[0])]
        return self._passes[tokens].run(ids, positions, slots, rows, meta)
