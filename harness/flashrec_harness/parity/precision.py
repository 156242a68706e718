"""What a low-precision engine may differ by: measured on this checkpoint, not picked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashrec_harness.parity.compare import Tolerance
from flashrec_harness.parity.ground import Ground
from flashrec_harness.references.hugging_face import TransformersReference
from flashrec_harness.references.oracle import Oracle
from flashrec_harness.references.types import RankedList, SearchCase

FLOAT32 = Tolerance()
_ERROR_RATIO = 2.0
_LOW_PRECISION_TIES = 9, 10
"""In bfloat16 near-ties abound: at n = 64 hardly a list is without one. Nine in ten may hold some."""


@dataclass(frozen=True, slots=True)
class ScoreErrors:
    """Largest score error against float64: of the judged engine, and of ``transformers`` in bfloat16."""

    ours: float
    transformers: float

    def tolerance(self) -> Tolerance:
        """A score may be off by twice what ``transformers`` is; closer than the engine's own error is a tie."""
        ties, lists = _LOW_PRECISION_TIES
        allowed = _ERROR_RATIO * self.transformers
        return Tolerance(score=allowed, tie_gap=min(self.ours, allowed), ties=ties, lists=lists)


def float64_error(oracle: Oracle, cases: Sequence[SearchCase], lists: Sequence[RankedList]) -> float:
    """Largest difference in score or sum between ``lists`` and the float64 scores of the same hypotheses."""
    worst = 0.0
    for case, ranked in zip(cases, lists, strict=True):
        for hypothesis in ranked:
            exact = oracle.score(case, hypothesis.token_ids)
            worst = max(worst, abs(hypothesis.score - exact.score), abs(hypothesis.cumulative - exact.cumulative))
    return worst


def transformers_error(oracle: Oracle, ground: Ground, cases: Sequence[SearchCase]) -> float:
    """:func:`float64_error` of ``transformers`` in bfloat16."""
    reference: Any = TransformersReference(ground.model_path, ground.grammar_of, dtype=torch.bfloat16)
    return float64_error(oracle, cases, reference.search(cases))
