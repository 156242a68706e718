"""A running server under judgement, ours or SGLang's, through its ``/generate``.

SGLang's rules for finished hypotheses hold there on both.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from flashrec.kernels.ops import UNUSED
from flashrec_harness.parity.subjects import sent_prompt
from flashrec_harness.references.sglang_http import SglangReference
from flashrec_harness.references.types import Hypothesis, RankedList, SearchCase

_TIMEOUT_S = 120.0
_CONNECTIONS = 4


def served_subject(url: str) -> FlashRecSubject | SglangSubject:
    """The server at ``url``, told by its ``/server_info`` to be ours or SGLang.

    Raises:
        httpx.HTTPError: it does not answer.
    """
    response = httpx.get(f"{url}/server_info", timeout=_TIMEOUT_S, trust_env=False)
    response.raise_for_status()
    info: dict[str, Any] = response.json()
    return FlashRecSubject(url, info) if "engine_config" in info else SglangSubject(url, info)


class SglangSubject(SglangReference):
    """A running SGLang server: free search only."""

    def __init__(self, url: str, info: dict[str, Any]) -> None:
        super().__init__(url)
        self.label = f"SGLang at {url}"
        self.dtype = str(info["dtype"])
        self.fp8 = "fp8" in str(info.get("quantization"))

    def refusal(self, case: SearchCase) -> str:
        if case.catalog is not None:
            return "SGLang has no catalogs"
        if case.length_penalty != 1.0:
            return "SGLang's length penalty is 1.0"
        return _rules_refusal(case)


class FlashRecSubject:
    """A running server of ours."""

    name = "flashrec"

    def __init__(self, url: str, info: dict[str, Any]) -> None:
        self.label = f"server at {url}"
        self.dtype = str(info["engine"]["dtype"])
        self.fp8 = info["engine"]["kernels"]["linear_fp8"] != UNUSED
        self._client = httpx.Client(base_url=url, timeout=_TIMEOUT_S, trust_env=False)
        self._info = info

    def close(self) -> None:
        self._client.close()

    def refusal(self, case: SearchCase) -> str:
        if case.catalog is None:
            return _rules_refusal(case)
        if self._info.get("catalog") is None:
            return "the server has no catalog"
        served = bool(self._info["engine_config"]["score_end"])
        return "" if served == case.score_end else f"the server runs with score_end={served}"

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
        return tuple(_from_json(beam) for beam in response.json()["meta_info"]["beam_results"])

    @staticmethod
    def _payload(case: SearchCase) -> dict[str, Any]:
        constrained = case.catalog is not None
        parameters: dict[str, Any] = {
            "n": case.n,
            "beam_width": case.beam_width,
            "max_new_tokens": case.max_tokens,
            "temperature": 0,
            "length_penalty": case.length_penalty,
            "constrained": constrained,
        }
        if constrained:
            parameters["score_space"] = case.space.value
            parameters["exclude"] = [list(sid) for sid in case.exclude]
            parameters["allow"] = None if case.allow is None else [list(sid) for sid in case.allow]
        if case.stop_token_ids and not constrained:
            parameters["stop_token_ids"] = list(case.stop_token_ids)
        else:
            parameters["ignore_eos"] = True
        return {"input_ids": list(sent_prompt(case)), "sampling_params": parameters}


def _rules_refusal(case: SearchCase) -> str:
    if case.stop_token_ids and case.semantics != "sglang":
        return "/generate has SGLang's rules for stop tokens only"
    return ""


def _from_json(beam: dict[str, Any]) -> Hypothesis:
    meta = beam["meta_info"]
    tokens = tuple(int(token) for token in beam["output_ids"])
    return Hypothesis(tokens, float(meta["cumulative_logprob"]), float(meta["sequence_score"]))
