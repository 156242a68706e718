"""What is judged: the engine in this process, or a running server over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import httpx

from flashrec import Beam, Engine, EngineConfig, Request
from flashrec_harness.parity.ground import Ground
from flashrec_harness.references.types import Hypothesis, RankedList, SearchCase, Searcher, Tokens

MAX_WIDTH = 64
_TIMEOUT_S = 120.0
_CONNECTIONS = 4

EngineKey = tuple[str | None, bool]
"""Catalog and ``score_end``: what an engine is started with and a request cannot change."""


class JudgedSearcher(Searcher, Protocol):
    """A searcher under judgement; it may decline a case."""

    def refusal(self, case: SearchCase) -> str:
        """Why it cannot answer ``case``; empty if it can."""
        ...


class EngineSubject:
    """:class:`flashrec.Engine` here; one engine at a time, its cases together in mixed waves."""

    name = "flashrec"

    def __init__(self, ground: Ground, *, device: str = "cpu", dtype: str = "float32", **config: Any) -> None:
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


class HttpSubject:
    """A running server, ours or SGLang, through ``/generate``.

    SGLang's rules for finished hypotheses hold there on both.
    """

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=_TIMEOUT_S, trust_env=False)
        info = self._client.get("/server_info")
        info.raise_for_status()
        self.info: dict[str, Any] = info.json()
        self.is_flashrec = "engine_config" in self.info
        self.name = "flashrec" if self.is_flashrec else "sglang"

    def close(self) -> None:
        self._client.close()

    @property
    def dtype(self) -> str:
        """The compute type that the server names; ``auto`` where it does not say what that came to."""
        told = self.info.get("engine_config", self.info).get("dtype", "auto")
        return str(told)

    def refusal(self, case: SearchCase) -> str:
        """Why this server cannot answer ``case``; empty if it can."""
        if case.semantics != "sglang" and case.stop_token_ids:
            return "/generate has SGLang's rules for stop tokens only"
        if self.is_flashrec:
            if case.catalog is None:
                return ""
            if self.info.get("catalog") is None:
                return "the server has no catalog"
            served = bool(self.info["engine_config"]["score_end"])
            return "" if served == case.score_end else f"the server runs with score_end={served}"
        if case.catalog is not None:
            return "SGLang has no catalogs"
        return "" if case.length_penalty == 1.0 else "SGLang's length penalty is 1.0"

    def search(self, cases: Sequence[SearchCase]) -> list[RankedList]:
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            return list(pool.map(self._rank, cases))

    def _rank(self, case: SearchCase) -> RankedList:
        response = self._client.post("/generate", json=self._payload(case))
        if response.is_error:
            raise httpx.HTTPStatusError(
                f"{case.name}: HTTP {response.status_code}: {response.text[:300]}",
                request=response.request,
                response=response,
            )
        beams = response.json()["meta_info"]["beam_results"]
        return tuple(_from_json(beam, case) for beam in beams)

    def _payload(self, case: SearchCase) -> dict[str, Any]:
        parameters: dict[str, Any] = {
            "n": case.n,
            "beam_width": case.beam_width,
            "max_new_tokens": case.max_tokens,
            "temperature": 0,
        }
        if case.stop_token_ids and case.catalog is None:
            parameters["stop_token_ids"] = list(case.stop_token_ids)
        else:
            parameters["ignore_eos"] = True
        if self.is_flashrec:
            parameters["length_penalty"] = case.length_penalty
            parameters["constrained"] = case.catalog is not None
            if case.catalog is not None:
                parameters["score_space"] = case.space.value
                parameters["exclude"] = [list(sid) for sid in case.exclude]
                parameters["allow"] = None if case.allow is None else [list(sid) for sid in case.allow]
        return {"input_ids": list(sent_prompt(case)), "sampling_params": parameters}


def sent_prompt(case: SearchCase) -> Tokens:
    """The prompt as the judged engine gets it."""
    return case.prompt[:-1] if case.implicit_begin else case.prompt


def _ranked(beams: Sequence[Beam]) -> RankedList:
    return tuple(Hypothesis(beam.token_ids, beam.cumulative_logprob, beam.score) for beam in beams)


def _from_json(beam: dict[str, Any], case: SearchCase) -> Hypothesis:
    tokens = tuple(int(token) for token in beam["output_ids"])
    meta = beam["meta_info"]
    score = float(meta["sequence_score"])
    total = meta.get("cumulative_logprob", score * len(tokens) ** case.length_penalty)
    return Hypothesis(tokens, float(total), score)
