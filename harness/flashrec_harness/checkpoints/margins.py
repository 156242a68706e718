"""How far apart neighbouring ranks lie: what a checkpoint must have before parity means anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer

from flashrec.request import ScoreSpace
from flashrec.sid import SidLayout, infer_layout, load_catalog, peek_depth
from flashrec_harness.prompts import PromptBuilder
from flashrec_harness.references.grammar import Grammar, SidVocabulary
from flashrec_harness.references.logits import Float64Logits
from flashrec_harness.references.oracle import Oracle
from flashrec_harness.references.types import SearchCase

CATALOG = "catalog.json"
SMALL_GAP = 1e-4
MIN_MEDIAN_GAP = 1e-2
MAX_SMALL_SHARE = 0.005


@dataclass(frozen=True, slots=True)
class Margins:
    """Differences between the scores of neighbouring ranks, pooled over prompts.

    A score is the summed log-probability over the length (SPEC B1 with length penalty 1, the implied end token
    counted), so ``median_gap`` is in nats per token. ``small_share``: the share of gaps below 1e-4.
    """

    space: str
    prompts: int
    gaps: int
    median_gap: float
    small_share: float

    @property
    def sufficient(self) -> bool:
        """A median of at least 1e-2, and fewer than 0.5 % of gaps below 1e-4."""
        return self.median_gap >= MIN_MEDIAN_GAP and self.small_share < MAX_SMALL_SHARE

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def margins(
    path: Path,
    prompts: Sequence[Sequence[int]],
    n: int = 64,
    *,
    spaces: Sequence[ScoreSpace] = tuple(ScoreSpace),
) -> list[Margins]:
    """The margins of a checkpoint directory's own catalog at beam width ``n``, in float64 by brute force.

    ``prompts``: token ids without the begin token. One entry per score space; they share most forward passes.
    Raises whatever reading the directory raises.
    """
    layout = infer_layout(AutoTokenizer.from_pretrained(path), depth=peek_depth(path / CATALOG))
    oracle = own_oracle(path)
    scores: dict[ScoreSpace, list[NDArray[np.float64]]] = {space: [] for space in spaces}
    for prompt in prompts:
        for space, ranked in scores.items():
            beams = oracle.rank(case_of(prompt, layout, n, space))
            ranked.append(np.array([hypothesis.score for hypothesis in beams]))
    return [summarise(space, ranked) for space, ranked in scores.items()]


def history_prompts(path: Path, histories: Sequence[Sequence[str]]) -> list[tuple[int, ...]]:
    """Prompts of a checkpoint directory after ``histories`` (item ids)."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    layout = infer_layout(tokenizer, depth=peek_depth(path / CATALOG))
    return PromptBuilder(tokenizer, layout, load_catalog(path / CATALOG, layout)).prompts(histories)


def own_oracle(path: Path) -> Oracle:
    """The float64 oracle over a checkpoint directory and the catalog in it."""
    layout = infer_layout(AutoTokenizer.from_pretrained(path), depth=peek_depth(path / CATALOG))
    catalog = load_catalog(path / CATALOG, layout)
    codebooks = tuple(tuple(book.tolist()) for book in layout.codebooks)
    vocabulary = SidVocabulary(codebooks, layout.begin, layout.end)
    grammar = Grammar(map(tuple, catalog.sids.tolist()), vocabulary)
    return Oracle(Float64Logits(path), lambda case: grammar)


def case_of(prompt: Sequence[int], layout: SidLayout, n: int, space: ScoreSpace) -> SearchCase:
    """A catalog search of width ``n`` after ``prompt`` (without the begin token)."""
    begin = () if layout.begin is None else (layout.begin,)
    return SearchCase(
        name="margins",
        prompt=(*prompt, *begin),
        n=n,
        beam_width=n,
        max_tokens=layout.depth,
        space=space,
        catalog=CATALOG,
    )


def summarise(space: ScoreSpace, scores: Sequence[NDArray[np.float64]]) -> Margins:
    """Pool the gaps of ranked score lists, best first."""
    gaps = np.concatenate([-np.diff(ranked) for ranked in scores])
    return Margins(
        space=space.value,
        prompts=len(scores),
        gaps=len(gaps),
        median_gap=float(np.median(gaps)),
        small_share=float(np.mean(gaps < SMALL_GAP)),
    )
