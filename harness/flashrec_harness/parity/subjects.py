"""What is judged: a protocol, and the engine in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from flashrec import Beam, Engine, EngineConfig, Request
from flashrec_harness.parity.ground import Ground
from flashrec_harness.references.dequantized import is_fp8
from flashrec_harness.references.types import Hypothesis, RankedList, SearchCase, Searcher, Tokens

MAX_WIDTH = 64

EngineKey = tuple[str | None, bool]
"""Catalog and ``score_end``: what an engine is started with and a request cannot change."""


class JudgedSearcher(Searcher, Protocol):
    """A searcher under judgement; it may decline a case.

    ``label`` tells its checks from those of others, ``dtype`` is what it computes in, ``fp8`` whether its
    projections multiply FP8 codes.
    """

    label: str
    dtype: str
    fp8: bool

    def refusal(self, case: SearchCase) -> str:
        """Why it cannot answer ``case``; empty if it can."""
        ...


class EngineSubject:
    """:class:`flashrec.Engine` here; one engine at a time, its cases together in mixed waves."""

    name = "flashrec"

    def __init__(
        self, ground: Ground, *, device: str = "cpu", dtype: str = "float32", label: str = "", **config: Any
    ) -> None:
        self.label = label
        self.dtype = dtype
        self.fp8 = config.get("quantization") == "fp8" or is_fp8(ground.model_path)
        self._ground = ground
        self._config = {"device": device, "dtype": dtype, "max_beam_width": MAX_WIDTH, **config}

    def refusal(self, case: SearchCase) -> str:
        return ""

    def search(self, cases: Sequence[SearchCase]) -> list[RankedList]:
        groups: dict[EngineKey, list[int]] = {}
        for index, case in enumerate(cases):
            groups.setdefault((case.catalog, case.score_end), []).append(index)
        answers: dict[int, RankedList] = {}
        for key, indices in groups.items():
            engine = self.engine(key)
            try:
                results = engine.generate([self.request(cases[index]) for index in indices])
                answers.update((i, _ranked(result.beams)) for i, result in zip(indices, results, strict=True))
            finally:
                engine.close()
        return [answers[index] for index in range(len(cases))]

    def engine(self, key: EngineKey, **config: Any) -> Engine:
        """An engine for cases with this catalog and ``score_end``; ``config`` overrides the subject's own."""
        name, score_end = key
        catalog = None if name is None else self._ground.catalogs[name].path
        return Engine(
            EngineConfig(
                model_path=self._ground.model_path,
                sid_vocab_file=catalog,
                sid=None if name is None else self._ground.sid,
                score_end=score_end,
                **(self._config | config),
            )
        )

    def request(self, case: SearchCase) -> Request:
        """``case`` as a request of the engine."""
        constrained = case.catalog is not None
        return Request(
            input_ids=sent_prompt(case),
            n=case.n,
            beam_width=case.beam_width,
            max_tokens=None if constrained else case.max_tokens,
            length_penalty=case.length_penalty,
            score_space=case.space if constrained else None,
            stop_token_ids=() if constrained else case.stop_token_ids,
            ignore_eos=not case.stop_token_ids,
            semantics=case.semantics,
            constrained=constrained,
            exclude_sids=case.exclude,
            allow_sids=case.allow,
        )


def sent_prompt(case: SearchCase) -> Tokens:
    """The prompt as the judged engine gets it."""
    return case.prompt[:-1] if case.implicit_begin else case.prompt


def _ranked(beams: Sequence[Beam]) -> RankedList:
    return tuple(Hypothesis(beam.token_ids, beam.cumulative_logprob, beam.score) for beam in beams)
