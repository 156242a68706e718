"""Selection with a total order, and with near-ties that may be settled by what was observed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flashrec_harness.references.types import Tokens


@dataclass(frozen=True, slots=True)
class Row:
    """A prefix and the sum of its log-probabilities."""

    tokens: Tokens
    cumulative: float


@dataclass(slots=True)
class Guide:
    """Candidates in ``prefixes`` win over others that score less than ``band`` above them.

    ``slack`` is the largest lead that a candidate had and still lost because of it.
    """

    prefixes: frozenset[Tokens] = frozenset()
    band: float = 0.0
    slack: float = field(default=0.0, init=False)

    def bonus(self, tokens: Tokens) -> float:
        return self.band if tokens in self.prefixes else 0.0

    def note(self, kept: Sequence[float], dropped: Sequence[float]) -> None:
        if kept and dropped:
            self.slack = max(self.slack, max(dropped) - min(kept))


NO_GUIDE = Guide()


def select(candidates: Sequence[Row], width: int, guide: Guide) -> list[Row]:
    """The best ``width`` of ``candidates``, best first.

    ``candidates`` come in the order of (parent rank, token id), so a stable sort by score alone is the
    total order of SPEC B2.
    """
    scores = [row.cumulative for row in candidates]
    chosen = select_scores(scores, [row.tokens for row in candidates], width, guide)
    return [candidates[index] for index in chosen]


def select_scores(scores: Sequence[float], tokens: Sequence[Tokens], width: int, guide: Guide) -> list[int]:
    """Indices of the best ``width`` scores, best first; on a tie the earlier index."""
    keys = np.array([-(score + guide.bonus(name)) for score, name in zip(scores, tokens, strict=True)])
    order = np.argsort(keys, kind="stable")
    chosen = [int(index) for index in order[:width]]
    if guide.prefixes:
        guide.note([scores[i] for i in chosen], [scores[int(i)] for i in order[width:]])
    return sorted(chosen, key=lambda index: (-scores[index], index))


def best_extensions(rows: Sequence[Row], logprobs: NDArray[np.float64], width: int, guide: Guide) -> list[Row]:
    """The best ``width`` one-token extensions of ``rows`` over a whole vocabulary, best first.

    ``logprobs`` is ``[len(rows), vocab]``. Only candidates that can be among the best, near-ties included,
    become rows: sorting 64 rows of 150,000 tokens in full would take seconds.
    """
    totals = np.array([row.cumulative for row in rows])[:, None] + logprobs
    flat = totals.reshape(-1)
    keep = np.arange(flat.size)
    if flat.size > width:
        # One rank more than is kept, so that the guide sees the best candidate that was dropped.
        threshold = -np.partition(-flat, width)[width]
        keep = np.flatnonzero(flat >= threshold - guide.band)
    vocab = logprobs.shape[1]
    candidates = [Row((*rows[index // vocab].tokens, int(index % vocab)), float(flat[index])) for index in keep]
    return select(candidates, width, guide)
