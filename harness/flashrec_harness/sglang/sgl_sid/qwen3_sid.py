"""Qwen3 in SGLang whose next-token logits are masked to semantic-ID tries: score space ``children``.

``SID_TRIE`` names a JSON file::

    {"begin": id, "catalogs": [{"marker": id | null, "items": [[id, ...], ...]}]}

A prompt that ends in ``begin`` is searched within the catalog whose ``marker`` stands right before it, or the
one without a marker. Any other prompt is searched freely, also after the search itself has emitted ``begin``.
The items of a catalog have one length.

A row's prefix is rebuilt from the KV slots that it reads, so it survives prefix-cache hits and the beam
search's sharing of slots between rows.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from sglang.srt.models.qwen3 import Qwen3ForCausalLM as PlainQwen3

_MASKED = -1.0e30
_SLOTS = 1 << 20

Children = dict[tuple[int, ...], torch.Tensor]


def _children(items: list[list[int]]) -> Children:
    """Prefix -> its legal next token ids, ascending."""
    found: dict[tuple[int, ...], set[int]] = {}
    for item in items:
        for level, token in enumerate(item):
            found.setdefault(tuple(item[:level]), set()).add(token)
    return {prefix: torch.tensor(sorted(tokens)) for prefix, tokens in found.items()}


class Qwen3ForCausalLM(PlainQwen3):
    """The base model with a trie mask on its logits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        spec = json.loads(Path(os.environ["SID_TRIE"]).read_text(encoding="utf-8"))
        self._begin: int = spec["begin"]
        self._tries = {entry["marker"]: _children(entry["items"]) for entry in spec["catalogs"]}
        self._depth = max(len(item) for entry in spec["catalogs"] for item in entry["items"])
        self._token_of_slot = torch.full((_SLOTS,), -1, dtype=torch.int64)
        self._slot_is_prompt = torch.zeros(_SLOTS, dtype=torch.bool)

    @torch.no_grad()
    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        output = super().forward(input_ids, positions, forward_batch, *args, **kwargs)
        self._token_of_slot[forward_batch.out_cache_loc] = input_ids
        self._slot_is_prompt[forward_batch.out_cache_loc] = forward_batch.forward_mode.is_extend()
        slots = _request_slots(forward_batch)
        rows = zip(forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens.tolist(), strict=True)
        for index, (row, length) in enumerate(rows):
            first = max(0, length - self._depth - 1)
            allowed = self._allowed(slots[row, first:length].long())
            if allowed is not None:
                _keep_only(output.next_token_logits[index], allowed)
        return output

    def _allowed(self, slots: torch.Tensor) -> torch.Tensor | None:
        """Legal next tokens after the last slots of a row, ``None`` where it is not within a catalog."""
        tail = self._token_of_slot[slots].tolist()
        prompt = self._slot_is_prompt[slots].tolist()
        begins = [at for at, token in enumerate(tail) if token == self._begin and prompt[at]]
        if not begins:
            return None
        at = begins[-1]
        marker = tail[at - 1] if at else None
        trie = self._tries.get(marker, self._tries.get(None))
        return None if trie is None else trie.get(tuple(tail[at + 1 :]))


def _keep_only(logits: torch.Tensor, allowed: torch.Tensor) -> None:
    kept = logits[allowed].clone()
    logits.fill_(_MASKED)
    logits[allowed] = kept


def _request_slots(forward_batch: Any) -> torch.Tensor:
    pool = getattr(forward_batch, "req_to_token_pool", None)
    if pool is None:
        from sglang.srt.model_executor.forward_context import get_req_to_token_pool

        pool = get_req_to_token_pool()
    return pool.req_to_token


EntryClass = Qwen3ForCausalLM
