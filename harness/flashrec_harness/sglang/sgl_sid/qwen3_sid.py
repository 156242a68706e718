"""Qwen3 in SGLang whose next-token logits are masked to semantic-ID tries: score space ``children``.

``SID_TRIE`` names a JSON file ``{catalog: [[token id, ...], ...]}``. A request whose ``rid`` is
``catalog/anything`` searches within that catalog, from the end of its prompt on; any other searches freely.
Past the end of an item a row is free again.

A row's prefix is rebuilt from the KV slots that it reads, so it survives the beam search's sharing of slots
between rows. The server must run without a prefix cache, which may swap a prompt's last slot for an older one.
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
_FREE = -1

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
        catalogs: dict[str, list[list[int]]] = json.loads(Path(os.environ["SID_TRIE"]).read_text(encoding="utf-8"))
        self._tries = [_children(items) for items in catalogs.values()]
        self._place = {name: index for index, name in enumerate(catalogs)}
        self._depth = max(len(item) for items in catalogs.values() for item in items)
        self._token_of_slot = torch.full((_SLOTS,), -1, dtype=torch.int64)
        self._trie_after_slot = torch.full((_SLOTS,), _FREE, dtype=torch.int64)

    @torch.no_grad()
    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        output = super().forward(input_ids, positions, forward_batch, *args, **kwargs)
        self._token_of_slot[forward_batch.out_cache_loc] = input_ids
        self._trie_after_slot[forward_batch.out_cache_loc] = _FREE
        slots = _request_slots(forward_batch)
        rows = list(zip(forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens.tolist(), strict=True))
        if forward_batch.forward_mode.is_extend():
            for (row, length), rid in zip(rows, forward_batch.rids, strict=True):
                self._trie_after_slot[slots[row, length - 1]] = self._place.get(rid.rpartition("/")[0], _FREE)
        for index, (row, length) in enumerate(rows):
            first = max(0, length - self._depth)
            allowed = self._allowed(slots[row, first:length].long())
            if allowed is not None:
                _keep_only(output.next_token_logits[index], allowed)
        return output

    def _allowed(self, slots: torch.Tensor) -> torch.Tensor | None:
        """Legal next tokens after the last slots of a row, ``None`` where it is not within a catalog."""
        tries = self._trie_after_slot[slots].tolist()
        starts = [at for at, trie in enumerate(tries) if trie != _FREE]
        if not starts:
            return None
        prefix = self._token_of_slot[slots[starts[-1] + 1 :]].tolist()
        return self._tries[tries[starts[-1]]].get(tuple(prefix))


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
