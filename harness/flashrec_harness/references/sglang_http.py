"""A live SGLang server as a reference, over its native ``/generate``."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from flashrec.request import ScoreSpace
from flashrec_harness.references.grammar import Grammar
from flashrec_harness.references.types import Hypothesis, RankedList, SearchCase, length_score

_MASKED = -1.0e20
"""With fewer legal items than beams, the surplus scores below this (the trie model masks with -1e30)."""

_TIMEOUT_S = 120.0
_CONNECTIONS = 4


class SglangReference:
    """SGLang's beam search: ``vocab`` without a catalog, ``children`` within a catalog of its trie model."""

    name = "sglang"

    def __init__(self, url: str, grammar_of: Mapping[str, Grammar] | None = None) -> None:
        self._client = httpx.Client(base_url=url, timeout=_TIMEOUT_S, trust_env=False)
        self._grammars = grammar_of or {}

    def close(self) -> None:
        self._client.close()

    def search(self, cases: Sequence[SearchCase]) -> list[RankedList]:
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            return list(pool.map(self.rank, cases))

    def rank(self, case: SearchCase) -> RankedList:
        """The ranked list of one case.

        Raises:
            ValueError: the case asks for something that SGLang does not have.
            httpx.HTTPError: the server refused it, or is gone.
        """
        length = self._length(case)
        response = self._client.post("/generate", json=self._payload(case, length))
        response.raise_for_status()
        body = response.json()
        if case.beam_width == 1:
            return (_greedy(body, case.length_penalty),)
        return tuple(found for beam in body["meta_info"]["beam_results"] if (found := _ranked(beam)).score > _MASKED)

    def _length(self, case: SearchCase) -> int:
        if case.length_penalty != 1.0:
            raise ValueError(f"{case.name}: SGLang's length penalty is 1.0 and cannot be set")
        if case.catalog is None:
            return case.max_tokens
        if case.space is not ScoreSpace.CHILDREN or case.exclude or case.allow is not None:
            raise ValueError(f"{case.name}: SGLang's trie model has score space children and no filters")
        grammar = self._grammars[case.catalog]
        return grammar.depth + (grammar.end is not None)

    @staticmethod
    def _payload(case: SearchCase, length: int) -> dict[str, Any]:
        parameters: dict[str, Any] = {
            "n": case.n,
            "max_new_tokens": length,
            "temperature": 0,
        }
        if case.beam_width > 1:
            parameters["beam_width"] = case.beam_width
        if case.stop_token_ids and case.catalog is None:
            parameters["stop_token_ids"] = list(case.stop_token_ids)
        else:
            parameters["ignore_eos"] = True  # in SGLang this drops explicit stop tokens as well
        payload: dict[str, Any] = {"input_ids": list(case.prompt), "sampling_params": parameters}
        if case.catalog is not None:
            payload["rid"] = f"{case.catalog}/{uuid.uuid4().hex}"
        if case.beam_width == 1:
            payload["return_logprob"] = True
        return payload


def trie_file_content(grammars: Mapping[str, Grammar]) -> dict[str, list[list[int]]]:
    """What ``SID_TRIE`` holds for the trie model: the token ids of every item, by catalog."""
    return {name: _items(grammar) for name, grammar in grammars.items()}


def _items(grammar: Grammar) -> list[list[int]]:
    end = [] if grammar.end is None else [grammar.end]
    return [[*grammar.vocabulary.token_ids(codes), *end] for codes in sorted(grammar.legal)]


def _ranked(beam: dict[str, Any]) -> Hypothesis:
    tokens = tuple(beam["output_ids"])
    score = float(beam["meta_info"]["sequence_score"])
    return Hypothesis(tokens, score * len(tokens), score)


def _greedy(body: dict[str, Any], length_penalty: float) -> Hypothesis:
    logprobs = body["meta_info"]["output_token_logprobs"]
    tokens = tuple(int(entry[1]) for entry in logprobs)
    cumulative = float(sum(entry[0] for entry in logprobs))
    return Hypothesis(tokens, cumulative, length_score(cumulative, len(tokens), length_penalty))
