"""What a low-precision engine may differ by: measured on this checkpoint, not picked.

For bfloat16 the measure is ``transformers`` in bfloat16. For FP8 it is the float64 oracle with every projection's input
rounded to e4m3 by the engine's reference quantiser, on the hypotheses that the engine returned. Both are held against
the oracle, which has the same weights (an FP8 engine's: its codes times their scales) and rounds no activation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flashrec_harness.parity.compare import Tolerance
from flashrec_harness.parity.ground import Ground
from flashrec_harness.references.hugging_face import TransformersReference
from flashrec_harness.references.logits import Float64Logits
from flashrec_harness.references.oracle import Oracle
from flashrec_harness.references.types import RankedList, SearchCase

FLOAT32 = Tolerance()
_ERROR_RATIO = 2.0
_LOW_PRECISION_TIES = 9, 10
"""In bfloat16 and FP8 near-ties abound: at n = 64 hardly a list is without one. Nine in ten may hold some."""


@dataclass(frozen=True, slots=True)
class ScoreErrors:
    """Largest score error against float64: of the judged engine, and of the yardstick in its precision."""

    ours: float
    yardstick: float

    def tolerance(self, *, fp8: bool = False) -> Tolerance:
        """A score may be off by twice what the yardstick's is; closer than the engine's own error is a tie.

        In FP8 errors as large as the largest are common, and of either sign: a margin is off by two of them.
        """
        ties, lists = _LOW_PRECISION_TIES
        allowed = _ERROR_RATIO * self.yardstick
        margin_error = 2 * self.ours if fp8 else self.ours
        return Tolerance(score=allowed, tie_gap=min(margin_error, allowed), ties=ties, lists=lists)


def float64_error(oracle: Oracle, cases: Sequence[SearchCase], lists: Sequence[RankedList]) -> float:
    """Largest difference in score or sum between ``lists`` and the float64 scores of the same hypotheses."""
    worst = 0.0
    for case, ranked in zip(cases, lists, strict=True):
        for hypothesis, exact in zip(ranked, oracle.scores(case, [h.token_ids for h in ranked]), strict=True):
            worst = max(worst, abs(hypothesis.score - exact.score), abs(hypothesis.cumulative - exact.cumulative))
    return worst


def transformers_error(oracle: Oracle, ground: Ground, cases: Sequence[SearchCase]) -> float:
    """:func:`float64_error` of ``transformers`` in bfloat16."""
    reference = TransformersReference(ground.model_path, ground.grammar_of, dtype=torch.bfloat16)
    return float64_error(oracle, cases, reference.search(cases))


def fp8_error(oracle: Oracle, cases: Sequence[SearchCase], lists: Sequence[RankedList]) -> float:
    """What rounding activations to FP8 does to the scores of ``lists``' hypotheses, in float64.

    On the same hypotheses, since the largest of many errors depends on which and how many they are. Raises
    :class:`TypeError` for an oracle without a model.
    """
    if not isinstance(oracle.source, Float64Logits):
        raise TypeError(f"{type(oracle.source).__name__} has no activations to round: the oracle needs Float64Logits")
    rounded = Oracle(oracle.source.with_fp8_activations(), oracle.grammar_of)
    pairs = zip(cases, lists, strict=True)
    scored = [tuple(rounded.scores(case, [h.token_ids for h in ranked])) for case, ranked in pairs]
    return float64_error(oracle, cases, scored)
