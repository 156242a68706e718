"""Any engine that can be judged: ours in this process, ``transformers``, or a server behind a URL."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashrec import Engine, EngineConfig, Request
from flashrec.errors import ConfigError
from flashrec.request import ScoreSpace
from flashrec_harness.evaluation.figures import Answers
from flashrec_harness.evaluation.testset import TestSet
from flashrec_harness.outcome import SuiteContext
from flashrec_harness.parity.served import served_subject
from flashrec_harness.perf.yardstick import catalog_grammar
from flashrec_harness.references.hugging_face import TransformersReference
from flashrec_harness.references.types import RankedList, SearchCase, Tokens

OURS, TRANSFORMERS = "flashrec", "transformers"
_OUR_FIELDS = frozenset({"dtype", "quantization", "kv_cache_dtype", "device", "attention_backend", "cpu_threads"})
_TRANSFORMERS_FIELDS = frozenset({"dtype"})
_BATCH_ROWS = 1600
"""Beams that ``transformers`` decodes together: more gain nothing on a CPU."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """``kind`` is ``flashrec``, ``transformers`` or a URL; ``fields`` are settings of an engine in this process."""

    kind: str
    fields: Mapping[str, str]

    @property
    def is_url(self) -> bool:
        return self.kind.startswith(("http://", "https://"))

    def __str__(self) -> str:
        settings = ",".join(f"{name}={value}" for name, value in self.fields.items())
        return f"{self.kind}:{settings}" if settings else self.kind


def parse_engine(text: str) -> EngineSpec:
    """``flashrec``, ``transformers``, ``flashrec:dtype=bfloat16,quantization=fp8`` or a URL.

    Raises :class:`ConfigError` for anything else.
    """
    if text.startswith(("http://", "https://")):
        return EngineSpec(text, {})
    kind, _, settings = text.partition(":")
    allowed = {OURS: _OUR_FIELDS, TRANSFORMERS: _TRANSFORMERS_FIELDS}.get(kind)
    if allowed is None:
        raise ConfigError(f"engine {text!r}: {OURS}, {TRANSFORMERS} or a URL, with settings as {OURS}:dtype=bfloat16")
    pairs = [setting.partition("=") for setting in settings.split(",") if setting]
    for name, _, value in pairs:
        if name not in allowed or not value:
            raise ConfigError(f"engine {text!r}: a setting is NAME=VALUE with a NAME of {', '.join(sorted(allowed))}")
    return EngineSpec(kind, {name: value for name, _, value in pairs})


def ask(
    spec: EngineSpec, context: SuiteContext, test: TestSet, *, n: int, space: ScoreSpace, trie: Sequence[bool]
) -> list[Answers]:
    """``n``-wide lists for every row of ``test``, for each value of ``trie``.

    Without the trie the search runs freely over the whole vocabulary, for as many tokens as an SID has codes.
    Raises :class:`ConfigError` for a score space that the engine does not have.
    """
    if spec.kind == TRANSFORMERS and space not in TransformersReference.spaces:
        known = ", ".join(sorted(TransformersReference.spaces))
        raise ConfigError(f"--space {space}: transformers has {known}")
    asked = {OURS: _ask_ours, TRANSFORMERS: _ask_transformers}.get(spec.kind, _ask_server)
    return asked(spec, context, test, n, space, trie)


def _ask_ours(
    spec: EngineSpec, context: SuiteContext, test: TestSet, n: int, space: ScoreSpace, trie: Sequence[bool]
) -> list[Answers]:
    fields: dict[str, Any] = dict(spec.fields)
    engine = Engine(
        EngineConfig(
            model_path=context.model_path,
            sid_vocab_file=context.sid_vocab_file,
            sid=context.sid,
            max_beam_width=n,
            **fields,
        )
    )
    try:
        out = []
        for constrained in trie:
            started = time.perf_counter()
            results = engine.generate([_request(prompt, test, n, space, constrained) for prompt in test.prompts])
            lists = [[beam.token_ids for beam in result.beams] for result in results]
            out.append(Answers(str(spec), constrained, lists, time.perf_counter() - started))
        return out
    finally:
        engine.close()


def _request(prompt: Tokens, test: TestSet, n: int, space: ScoreSpace, constrained: bool) -> Request:
    if constrained:
        return Request(input_ids=prompt, n=n, score_space=space)
    return Request(
        input_ids=(*prompt, *_begin(test)), n=n, constrained=False, max_tokens=test.layout.depth, ignore_eos=True
    )


def _ask_transformers(
    spec: EngineSpec, context: SuiteContext, test: TestSet, n: int, space: ScoreSpace, trie: Sequence[bool]
) -> list[Answers]:
    import torch

    dtype: torch.dtype = getattr(torch, spec.fields.get("dtype", "float32"))
    grammar = catalog_grammar(test.material)
    reference = TransformersReference(context.model_path, lambda _case: grammar, dtype)
    out = []
    for constrained in trie:
        started = time.perf_counter()
        cases = _cases(test, n, space, constrained)
        ranked = reference.search_batched(cases, max(_BATCH_ROWS // n, 1))
        out.append(Answers(str(spec), constrained, _tokens(ranked), time.perf_counter() - started))
    return out


def _ask_server(
    spec: EngineSpec, context: SuiteContext, test: TestSet, n: int, space: ScoreSpace, trie: Sequence[bool]
) -> list[Answers]:
    out = []
    with contextlib.closing(served_subject(spec.kind)) as subject:
        for constrained in trie:
            started = time.perf_counter()
            cases = _cases(test, n, space, constrained)
            refusal = subject.refusal(cases[0])
            if refusal:
                raise ConfigError(f"{spec.kind}: {refusal}; run it without the trie (--trie off)")
            ranked = subject.search(cases)
            out.append(Answers(str(spec), constrained, _tokens(ranked), time.perf_counter() - started))
    return out


def _cases(test: TestSet, n: int, space: ScoreSpace, constrained: bool) -> list[SearchCase]:
    return [
        SearchCase(
            name=f"row {number}",
            prompt=(*prompt, *_begin(test)),
            n=n,
            beam_width=n,
            max_tokens=_emitted(test) if constrained else test.layout.depth,
            space=space if constrained else ScoreSpace.VOCAB,
            catalog="catalog" if constrained else None,
        )
        for number, prompt in enumerate(test.prompts, start=1)
    ]


def _emitted(test: TestSet) -> int:
    return test.layout.depth + (test.layout.end is not None)


def _begin(test: TestSet) -> Tokens:
    return () if test.layout.begin is None else (test.layout.begin,)


def _tokens(ranked: Sequence[RankedList]) -> list[list[Tokens]]:
    return [[hypothesis.token_ids for hypothesis in found] for found in ranked]
