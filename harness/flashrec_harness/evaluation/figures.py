"""From ranked token lists to figures, per semantic ID and per item."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flashrec.sid import SidLayout
from flashrec_harness import quality
from flashrec_harness.evaluation.testset import TestSet
from flashrec_harness.references.types import Tokens

PerRow = dict[str, NDArray[np.float64]]
"""``HR@k``, ``recall@k`` and ``NDCG@k``, one value per test row."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What an engine said to each test row: ``lists`` of emitted tokens, best first."""

    engine: str
    trie: bool
    lists: list[list[Tokens]]
    seconds: float


@dataclass(frozen=True, slots=True)
class Figures:
    """``invalid_rate``: share of beams that name no SID of the catalog. ``duplicate_rate``: share of beams whose SID
    the same list names before them."""

    per_sid: PerRow
    per_item: PerRow
    invalid_rate: float
    duplicate_rate: float
    beams: int

    def mean(self, metric: str) -> float:
        """Of a metric per SID."""
        return float(self.per_sid[metric].mean())

    def rows(self) -> list[dict[str, object]]:
        """The means as table rows."""
        return [
            {"metric": name, "per SID": float(values.mean()), "per item": float(self.per_item[name].mean())}
            for name, values in self.per_sid.items()
        ]


def figures(answers: Answers, test: TestSet, n: int) -> Figures:
    """Judge ``n``-wide lists. A beam that names no SID keeps its place and hits nothing.

    Per item, each SID is replaced by its items in the order of the catalog's file; an item that stands under two
    SIDs counts at its first place.
    """
    ranked = [_ranks(found, test) for found in answers.lists]
    beams = sum(map(len, ranked))
    invalid = sum(rank < 0 for ranks in ranked for rank in ranks)
    repeated = sum(len(legal) - len(set(legal)) for legal in ([r for r in ranks if r >= 0] for ranks in ranked))
    cutoffs = [k for k in quality.CUTOFFS if k <= n]
    items = [_items(ranks, test) for ranks in ranked]
    return Figures(
        per_sid=quality.row_metrics(ranked, test.sids, cutoffs),
        per_item=quality.row_metrics(items, test.items, cutoffs),
        invalid_rate=invalid / max(beams, 1),
        duplicate_rate=repeated / max(beams, 1),
        beams=beams,
    )


def _ranks(found: Sequence[Tokens], test: TestSet) -> list[int]:
    """The row of ``Catalog.sids`` that each beam names, -1 for none."""
    codes = [codes_of(tokens, test.layout) for tokens in found]
    known = [index for index, sid in enumerate(codes) if sid is not None]
    ranks = np.full(len(codes), -1, dtype=np.int64)
    if known:
        ranks[known] = test.catalog.rank([sid for sid in codes if sid is not None])
    listed: list[int] = ranks.tolist()
    return listed


def codes_of(tokens: Tokens, layout: SidLayout) -> tuple[int, ...] | None:
    """The codes of a beam's tokens, ``None`` if they are no semantic ID; an end token behind them is left out."""
    if layout.end is not None and len(tokens) == layout.depth + 1 and tokens[-1] == layout.end:
        tokens = tokens[:-1]
    if len(tokens) != layout.depth:
        return None
    codes = [np.flatnonzero(book == token) for book, token in zip(layout.codebooks, tokens, strict=True)]
    return tuple(int(found[0]) for found in codes) if all(map(len, codes)) else None


def _items(ranks: Sequence[int], test: TestSet) -> list[str | None]:
    """Items in rank order, ``None`` in the place of a beam that names none."""
    out: dict[str | int, str | None] = {}
    for place, rank in enumerate(ranks):
        if rank < 0:
            out[place] = None
        else:
            for item in test.catalog.items_of(rank):
                out.setdefault(item, item)
    return list(out.values())
