"""Captured prefill passes of few tokens, which launching kernel by kernel would bound.

One H200, Qwen3-1.7B shape, FP8, 2026-11-29: 2,465 tokens took 15.2 ms eagerly, of which the device worked 10;
303 tokens took 17.7 ms, of which it worked 3.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flashrec.attention.base import AttentionBackend, PrefillMeta
from flashrec.batch import Ends, ForwardBatch
from flashrec.config import EngineConfig
from flashrec.kernels.ops import Ops
from flashrec.models.base import CausalLM
from flashrec.runtime.graph import CapturedProgram
from flashrec.runtime.loading import Loaded
from flashrec.transfer import StaticBlock

MAX_TOKENS = 10240
"""Above it the device is the bottleneck by far. Capturing a size takes 75 ms (H200, 2026-11-29)."""


def token_buckets(limit: int) -> list[int]:
    """Token counts that prefill graphs exist for: multiples of 64 up to 5,120, then of 128."""
    return [size for size in (*range(64, 5120, 64), *range(5120, MAX_TOKENS + 1, 128)) if size <= limit]


class PrefillPass:
    """The static buffers and the graph of one token bucket, and a pinned buffer that is ready for its next layout."""

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
        # Tokens beyond a pass's are written to the scratch page, whose first slot is slot 0.
        self.attention = attention.static_prefill(tokens, requests, pages)
        self.block = StaticBlock({"tokens": (3, tokens), "ends": (requests,), **self.attention.fields}, device)
        ids, positions, slots = self.block["tokens"]
        self.attention.attach(self.block, positions)
        self.ends = torch.zeros(requests, dtype=torch.int64, device=device)
        ends = Ends(self.ends, self.attention.attend_ends)
        batch = ForwardBatch(positions, slots, self.attention.attend, ops, ends)

        def run() -> torch.Tensor:
            self.ends.copy_(self.block["ends"])
            hidden, residual = model.forward(ids, batch)
            return model.final_norm(hidden, residual, batch)

        self._program = CapturedProgram(run, f"the prefill of {tokens} tokens", memory)
        self.block.prepare()

    def run(self, tokens: NDArray[np.int32], meta: PrefillMeta) -> torch.Tensor:
        """See :meth:`PrefillGraphs.run`."""
        self.block.write({"tokens": tokens, "ends": meta.ends, **self.attention.plan(meta)})
        hidden = self._program.replay()
        self.block.prepare()  # while the device works on the pass
        return hidden[: len(meta.ends)]


class PrefillGraphs:
    """The passes of all token buckets of an engine, captured.

    Raises:
        CaptureError: an operation of a pass cannot be captured.
    """

    @torch.inference_mode()
    def __init__(self, config: EngineConfig, parts: Loaded) -> None:
        self.buckets = token_buckets(config.prefill_chunk)
        self.requests = config.max_requests
        pages = -(-parts.limits.max_context // config.page_tokens)
        memory = torch.cuda.graph_pool_handle()
        self._passes = {
            tokens: PrefillPass(
                parts.model,
                parts.attention,
                parts.ops,
                tokens=tokens,
                requests=self.requests,
                pages=pages,
                memory=memory,
            )
            for tokens in reversed(self.buckets)
        }

    def holds(self, tokens: int, requests: int) -> bool:
        """Whether a pass of this size runs from a graph."""
        return bool(self.buckets) and tokens <= self.buckets[-1] and requests <= self.requests

    def run(self, tokens: NDArray[np.int32], meta: PrefillMeta) -> torch.Tensor:
        """Run a pass over ``tokens`` int32 [3, T] (ids, positions, slots): the head's input [E, H] of the prompts
        that end in it, valid until the next replay."""
        bucket = self.buckets[bisect_left(self.buckets, tokens.shape[1])]
        return self._passes[bucket].run(tokens, meta)
