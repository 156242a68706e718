"""``transformers``' own ``generate`` as a reference: in float32, or as a yardstick for less."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from flashrec.request import ScoreSpace
from flashrec_harness.references.grammar import Grammar
from flashrec_harness.references.logits import load_transformers_model
from flashrec_harness.references.oracle import GrammarOf
from flashrec_harness.references.types import Hypothesis, RankedList, SearchCase, Tokens, length_score

_IMPOSSIBLE = -1.0e8
"""``generate`` fills missing hypotheses with scores of -1e9 or -inf; a sum of log-probabilities is above this."""


class TransformersReference:
    """``generate(num_beams=k)``, with ``prefix_allowed_tokens_fn`` for a catalog.

    Score space ``vocab`` masks after the softmax, as ``transformers`` does; ``children`` normalises once
    more after the mask (``renormalize_logits``). It has no other score space.
    """

    name = "transformers"
    spaces = frozenset({ScoreSpace.VOCAB, ScoreSpace.CHILDREN})

    def __init__(self, model_path: Path, grammar_of: GrammarOf, dtype: torch.dtype = torch.float32) -> None:
        from transformers import GenerationConfig

        self._model = load_transformers_model(model_path, dtype)
        # The checkpoint's own generation defaults (top-k, temperature, eos) must not leak into the search.
        self._model.generation_config = GenerationConfig()
        self._grammar_of = grammar_of

    def search(self, cases: Sequence[SearchCase]) -> list[RankedList]:
        return [self.rank(case) for case in cases]

    def likely(self, prompt: Tokens, length: int) -> Tokens:
        """The tokens of the greedy continuation of ``prompt``."""
        case = SearchCase(name="greedy", prompt=prompt, n=1, beam_width=1, max_tokens=length)
        return self.rank(case)[0].token_ids

    def search_batched(self, cases: Sequence[SearchCase], batch: int) -> list[RankedList]:
        """:meth:`search`, ``batch`` prompts of one length at a time; the cases differ in their prompts alone.

        A batched product may round otherwise than one alone: for judging quality, not bits.
        """
        by_length: dict[int, list[int]] = {}
        for index, case in enumerate(cases):
            by_length.setdefault(len(case.prompt), []).append(index)
        found: dict[int, RankedList] = {}
        for indices in by_length.values():
            for start in range(0, len(indices), batch):
                part = indices[start : start + batch]
                found.update(zip(part, self._rank_all([cases[index] for index in part]), strict=True))
        return [found[index] for index in range(len(cases))]

    def rank(self, case: SearchCase) -> RankedList:
        """The ranked list of one case; illegal or missing hypotheses are left out."""
        return self._rank_all([case])[0]

    def _rank_all(self, cases: Sequence[SearchCase]) -> list[RankedList]:
        """Cases with prompts of one length that differ in nothing else."""
        case = cases[0]
        if case.catalog is None:
            return self._generate(cases, case.max_tokens, None)
        grammar = self._grammar_of(case)
        if not grammar.legal:
            return [()] * len(cases)
        found = self._generate(cases, grammar.steps, _allowed_tokens(grammar, len(case.prompt)))
        implied = () if grammar.end is None or grammar.scored_end is not None else (grammar.end,)
        return [
            tuple(
                _hypothesis((*hypothesis.token_ids, *implied), hypothesis.cumulative, case.length_penalty)
                for hypothesis in ranked
            )
            for ranked in found
        ]

    @torch.no_grad()
    def _generate(self, cases: Sequence[SearchCase], steps: int, allowed: AllowedTokens | None) -> list[RankedList]:
        from transformers import GenerationConfig

        case = cases[0]
        beams: dict[str, Any] = {"num_beams": case.beam_width, "num_return_sequences": case.n}
        if case.beam_width > 1:
            beams |= {"early_stopping": "never", "length_penalty": case.length_penalty}
        stops = list(case.stop_token_ids) if allowed is None and case.stop_token_ids else None
        config = GenerationConfig(
            max_new_tokens=steps,
            do_sample=False,
            eos_token_id=stops,
            pad_token_id=stops[0] if stops else 0,
            renormalize_logits=case.space is ScoreSpace.CHILDREN,
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=case.beam_width == 1,
            **beams,
        )
        prompts = torch.tensor([case.prompt for case in cases])
        output = self._model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            generation_config=config,
            prefix_allowed_tokens_fn=allowed,
        )
        sequences = [self._emitted(row, case) for row in output.sequences.tolist()]
        if case.beam_width == 1:
            sums = [_greedy_sum(output, row, tokens, case) for row, tokens in enumerate(sequences)]
            return [
                (_hypothesis(tokens, total, case.length_penalty),)
                for tokens, total in zip(sequences, sums, strict=True)
            ]
        ranked = [
            Hypothesis(tokens, score * len(tokens) ** case.length_penalty, score)
            for tokens, score in zip(sequences, output.sequences_scores.tolist(), strict=True)
        ]
        return [
            tuple(hypothesis for hypothesis in ranked[start : start + case.n] if hypothesis.score > _IMPOSSIBLE)
            for start in range(0, len(ranked), case.n)
        ]

    @staticmethod
    def _emitted(sequence: list[int], case: SearchCase) -> Tokens:
        """The new tokens up to and including the first stop token; what follows is padding."""
        tokens = tuple(sequence[len(case.prompt) :])
        if case.catalog is not None:
            return tokens
        ends = [index for index, token in enumerate(tokens) if token in case.stop_token_ids]
        return tokens[: ends[0] + 1] if ends else tokens


AllowedTokens = Callable[[int, torch.Tensor], list[int]]


def _allowed_tokens(grammar: Grammar, prompt_length: int) -> AllowedTokens:
    known: dict[Tokens, list[int]] = {}

    def allowed(_batch: int, sequence: torch.Tensor) -> list[int]:
        prefix = tuple(sequence[prompt_length:].tolist())
        if prefix not in known:
            # `generate` refuses an empty list; a surplus row that left the catalog keeps its score of -1e9.
            known[prefix] = grammar.children(prefix).tolist() or [0]
        return known[prefix]

    return allowed


def _greedy_sum(output: Any, row: int, tokens: Tokens, case: SearchCase) -> float:
    """Greedy decoding reports no score: the sum of its tokens' log-probabilities."""
    steps = output.scores if case.space is ScoreSpace.CHILDREN else output.logits
    return float(
        sum(torch.log_softmax(step[row].float(), dim=-1)[token] for step, token in zip(steps, tokens, strict=False))
    )


def _hypothesis(tokens: Tokens, cumulative: float, length_penalty: float) -> Hypothesis:
    return Hypothesis(tokens, cumulative, length_score(cumulative, len(tokens), length_penalty))
