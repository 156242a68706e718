"""Brute-force beam search in float64, written from SPEC B1 to B7: the reference for what no other has.

Every step scores every candidate of every row and sorts them all by the total order (score, parent rank,
token id). :mod:`flashrec_harness.references.finished` holds the two ways to treat stop tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flashrec_harness.references.finished import FINISHERS
from flashrec_harness.references.grammar import Grammar
from flashrec_harness.references.logits import LogitSource
from flashrec_harness.references.selection import NO_GUIDE, Guide, Row, largest_inversion, select
from flashrec_harness.references.types import (
    Hypothesis,
    RankedList,
    SearchCase,
    Tokens,
    length_score,
)

GrammarOf = Callable[[SearchCase], Grammar]


def log_softmax(logits: NDArray[np.float64], over: NDArray[np.int64] | None) -> NDArray[np.float64]:
    """``logits`` less the log-sum-exp of the entries ``over`` (all where ``None``), along the last axis."""
    within = logits if over is None else logits[..., over]
    peak = within.max(axis=-1, keepdims=True)
    normed: NDArray[np.float64] = logits - peak - np.log(np.exp(within - peak).sum(axis=-1, keepdims=True))
    return normed


class Oracle:
    """Answers cases by brute force over ``source``; ``grammar_of`` gives the grammar of a catalog case."""

    name = "oracle"

    def __init__(self, source: LogitSource, grammar_of: GrammarOf) -> None:
        self.source = source
        self.grammar_of = grammar_of

    def search(self, cases: Sequence[SearchCase]) -> list[RankedList]:
        return [self.rank(case) for case in cases]

    def rank(self, case: SearchCase, guide: Guide = NO_GUIDE) -> RankedList:
        """The ranked list of ``case``; ``guide`` settles near-ties in favour of what was observed."""
        if case.catalog is None:
            return FINISHERS[case.semantics](case, self._expand_free, guide)[: case.n]
        return self._constrained(case, self.grammar_of(case), guide)[: case.n]

    def score(self, case: SearchCase, tokens: Tokens) -> Hypothesis:
        """``tokens`` scored as if the search had emitted them."""
        return self.scores(case, [tokens])[0]

    def scores(self, case: SearchCase, sequences: Sequence[Tokens]) -> list[Hypothesis]:
        """:meth:`score` of each of ``sequences``, those of one length in one forward pass.

        One that goes on where the catalog has nothing to go on with has a probability of 0.
        """
        grammar = self.grammar_of(case) if case.catalog is not None else None
        scored = [tokens[: grammar.steps] if grammar else tokens for tokens in sequences]
        sums = [0.0] * len(scored)
        for length in range(max(map(len, scored), default=0)):
            rows = [row for row, tokens in enumerate(scored) if len(tokens) > length]
            prefixes = [scored[row][:length] for row in rows]
            logits = self.source.next_logits(case.prompt, prefixes)
            for row, prefix, row_logits in zip(rows, prefixes, logits, strict=True):
                over = grammar.normaliser(case.space, prefix) if grammar else None
                impossible = over is not None and len(over) == 0
                sums[row] += -math.inf if impossible else float(log_softmax(row_logits, over)[scored[row][length]])
        pairs = zip(sequences, sums, strict=True)
        return [_hypothesis(tokens, cumulative, case.length_penalty) for tokens, cumulative in pairs]

    def _expand_free(self, case: SearchCase, rows: Sequence[Row]) -> NDArray[np.float64]:
        logits = self.source.next_logits(case.prompt, [row.tokens for row in rows])
        return log_softmax(logits, None)

    def _constrained(self, case: SearchCase, grammar: Grammar, guide: Guide) -> RankedList:
        if not grammar.legal:
            return ()
        rows = [Row((), 0.0)]
        for _ in range(grammar.steps):
            logits = self.source.next_logits(case.prompt, [row.tokens for row in rows])
            candidates = [
                Row((*row.tokens, int(token)), row.cumulative + float(logprobs[token]))
                for row, row_logits in zip(rows, logits, strict=True)
                for logprobs in [log_softmax(row_logits, grammar.normaliser(case.space, row.tokens))]
                for token in grammar.children(row.tokens)
            ]
            rows = select(candidates, case.beam_width, guide)
        implied = () if grammar.end is None or grammar.scored_end is not None else (grammar.end,)
        return tuple(_hypothesis((*row.tokens, *implied), row.cumulative, case.length_penalty) for row in rows)


def _hypothesis(tokens: Tokens, cumulative: float, length_penalty: float) -> Hypothesis:
    return Hypothesis(tokens, cumulative, length_score(cumulative, len(tokens), length_penalty))


@dataclass(frozen=True, slots=True)
class Explanation:
    """Whether a list is one that a float64 search could have returned, had its near-ties gone otherwise.

    ``gap`` is the largest float64 difference that had to be called a tie, in log-probability.
    """

    holds: bool
    gap: float
    reason: str = ""


def explain(oracle: Oracle, case: SearchCase, observed: RankedList, band: float) -> Explanation:
    """Judge a list against the float64 search with every gap below ``band`` left open.

    A near-tie may decide which prefix survives a step, and so which items the list holds far below, or only
    the order of two neighbours. Both are followed: wherever two candidates lie within ``band`` of each
    other, the observed one is taken, and the outcome must be the observed list.
    """
    guide = Guide(frozenset(_prefixes(observed)), band)
    guided = oracle.rank(case, guide)
    expected = {hypothesis.token_ids: hypothesis.score for hypothesis in guided}
    scores = [expected.get(hypothesis.token_ids) for hypothesis in observed]
    if len(observed) != len(guided) or len({h.token_ids for h in observed}) != len(observed):
        return Explanation(False, guide.slack, f"{len(observed)} hypotheses where {len(guided)} are due")
    known = [score for score in scores if score is not None]
    if len(known) != len(scores):
        rank = scores.index(None)
        tokens = observed[rank].token_ids
        return Explanation(False, guide.slack, f"rank {rank + 1} {tokens} is in no search within {band:g}")
    inversion = largest_inversion(known)
    gap = max(guide.slack, inversion)
    if inversion >= band:
        return Explanation(False, gap, f"two ranks are {inversion:.3g} out of order")
    return Explanation(True, gap)


def _prefixes(ranked: RankedList) -> set[Tokens]:
    return {
        hypothesis.token_ids[:length] for hypothesis in ranked for length in range(1, len(hypothesis.token_ids) + 1)
    }
