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
    """Candidates in ``prefixes`` rank before others that score less than ``band`` above them.

    ``slack`` is the largest lead that a candidate had over one that went before it.
    """

    prefixes: frozenset[Tokens] = frozenset()
    band: float = 0.0
    slack: float = field(default=0.0, init=False)

    def bonus(self, tokens: Tokens) -> float:
        return self.band if tokens in self.prefixes else 0.0


NO_GUIDE = Guide()


def select(candidates: Sequence[Row], width: int, guide: Guide) -> list[Row]:
    """The best ``width`` of ``candidates``, best first.

    ``candidates`` come in the order of (parent rank, token id), so a stable sort by score alone is the
    total order of SPEC B2.
    """
    scores = [row.cumulative for row in candidates]
    return [candidates[place] for place in select_scores(scores, [row.tokens for row in candidates], width, guide)]


def select_scores(scores: Sequence[float], tokens: Sequence[Tokens], width: int, guide: Guide) -> list[int]:
    """Places of the best ``width`` scores, best first; on a tie the earlier place."""
    keys = [-(score + guide.bonus(name)) for score, name in zip(scores, tokens, strict=True)]
    order = np.argsort(np.array(keys), kind="stable").tolist()
    if guide.prefixes:
        # One more than is kept: the lead of the best candidate that was dropped counts too.
        guide.slack = max(guide.slack, largest_inversion([scores[place] for place in order[: width + 1]]))
    chosen: list[int] = order[:width]
    return chosen


def largest_inversion(scores: Sequence[float]) -> float:
    """How far any score lies above one that comes before it."""
    lowest, worst = np.inf, 0.0
    for score in scores:
        worst = max(worst, score - lowest)
        lowest = min(lowest, score)
    return float(worst)


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
