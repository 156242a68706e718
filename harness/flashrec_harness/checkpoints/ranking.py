"""Batched beam search over a catalog with a transformers model: what training is judged by."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from flashrec.request import ScoreSpace
from flashrec.sid.layout import SidLayout
from flashrec.sid.trie import Trie


@dataclass(frozen=True, slots=True)
class Ranking:
    """``leaves``: rows of the catalog's ``sids``, best first; ``logprobs``: sums over the levels, in nats."""

    leaves: NDArray[np.int64]
    logprobs: NDArray[np.float64]


class CatalogRanker:
    """Ranks a catalog's SIDs after a prompt, with the begin token appended.

    Runs in the model's own dtype; ``n`` may exceed the number of SIDs. Prompts of one length share a batch, so
    nothing is padded. Ties keep torch's order: this is a judge of quality, not of parity.
    """

    def __init__(self, model: Any, layout: SidLayout, trie: Trie, space: ScoreSpace = ScoreSpace.SID) -> None:
        if layout.begin is None:
            raise ValueError("the layout has no begin token")
        self._model = model.eval()
        self._begin = layout.begin
        self._space = space
        self._codebooks = [torch.from_numpy(book.astype(np.int64)) for book in layout.codebooks]
        self._sid_tokens = torch.from_numpy(layout.sid_tokens.astype(np.int64))
        self._children = [torch.from_numpy(trie.dense(level).astype(np.int64)) for level in range(trie.depth)]

    @torch.inference_mode()
    def rank(self, prompts: Sequence[Sequence[int]], n: int, *, batch_rows: int = 2048) -> list[Ranking]:
        """The top ``n`` per prompt; at most ``batch_rows`` beams are decoded together."""
        by_length: dict[int, list[int]] = defaultdict(list)
        for index, prompt in enumerate(prompts):
            by_length[len(prompt)].append(index)
        out: dict[int, Ranking] = {}
        per_batch = max(batch_rows // n, 1)
        for indices in by_length.values():
            for start in range(0, len(indices), per_batch):
                chunk = indices[start : start + per_batch]
                ids = torch.tensor([[*prompts[i], self._begin] for i in chunk])
                out.update(zip(chunk, self._rank_batch(ids, n), strict=True))
        return [out[i] for i in range(len(prompts))]

    def _rank_batch(self, ids: torch.Tensor, n: int) -> list[Ranking]:
        prompts = len(ids)
        cache = DynamicCache()
        scores = torch.zeros(prompts, 1, dtype=self._model.dtype)
        nodes = torch.zeros(prompts, 1, dtype=torch.int64)
        for level, codebook in enumerate(self._codebooks[: len(self._children)]):
            # The cache goes by position: its keyword changed its name within transformers 5.
            hidden = self._model.model(ids, None, None, cache, use_cache=True).last_hidden_state[:, -1]
            children = self._children[level][nodes]
            gained = self._logprobs(self._model.lm_head(hidden), codebook, children.flatten(0, 1))
            totals = scores[..., None] + gained.view(*nodes.shape, -1)
            totals = totals.masked_fill(children < 0, -torch.inf).flatten(1)
            scores, best = totals.topk(min(n, totals.shape[1]))
            parents, codes = best // len(codebook), best % len(codebook)
            rows: Any = (torch.arange(prompts)[:, None] * nodes.shape[1] + parents).flatten()
            nodes = children.flatten(1).gather(1, best)
            cache.reorder_cache(rows)
            ids = codebook[codes].view(-1, 1)
        return [_ranking(*pair) for pair in zip(nodes, scores, strict=True)]

    def _logprobs(self, logits: torch.Tensor, codebook: torch.Tensor, children: torch.Tensor) -> torch.Tensor:
        """``[rows, codes]`` log-probabilities of a level's codes in the score space (SPEC B3)."""
        level = logits[:, codebook]
        if self._space is ScoreSpace.LEVEL:
            return level.log_softmax(-1)
        if self._space is ScoreSpace.CHILDREN:
            return level.masked_fill(children < 0, -torch.inf).log_softmax(-1)
        over = logits[:, self._sid_tokens] if self._space is ScoreSpace.SID else logits
        return level - over.logsumexp(-1, keepdim=True)


def _ranking(nodes: torch.Tensor, scores: torch.Tensor) -> Ranking:
    legal = (nodes >= 0) & scores.isfinite()
    return Ranking(nodes[legal].numpy(), scores[legal].double().numpy())
