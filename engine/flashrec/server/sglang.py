"""SGLang's native ``/generate``: its request fields and the shape of its beam-search answers.

Read from SGLang 0.5.21: ``n`` is the number of returned sequences, ``meta_info.beam_results`` lists them best
first, and the first one's text and ids stand at the top as well.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated, Any

import orjson
from pydantic import ConfigDict, Discriminator, Field, JsonValue, Tag

from flashrec.errors import RequestError
from flashrec.request import Request, Result, ScoreSpace
from flashrec.server.context import Context
from flashrec.server.filters import filter_fields, filter_names
from flashrec.server.jobs import Job, Payload
from flashrec.server.pins import Pins
from flashrec.server.rows import Fields, rows
from flashrec.server.schemas import (
    CatalogName,
    Count,
    ItemOrSid,
    LengthPenalty,
    Name,
    ScoreSpaceName,
    Seed,
    Temperature,
    TextPrompt,
    TokenIds,
    TokenPrompt,
)
from flashrec.server.text import TextCodec
from flashrec.server.unused import UnusedGenerate, UnusedSglangSampling

_NAMES = {
    "n": "sampling_params.n",
    "beam_width": "sampling_params.beam_width",
    "max_tokens": "sampling_params.max_new_tokens",
    "temperature": "sampling_params.temperature",
    "stop_token_ids": "sampling_params.stop_token_ids",
    "seed": "sampling_params.sampling_seed",
    "length_penalty": "sampling_params.length_penalty",
    "score_space": "sampling_params.score_space",
    "constrained": "sampling_params.constrained",
    "catalog": "sampling_params.catalog",
} | filter_names("sampling_params.")


class SamplingParams(UnusedSglangSampling):
    """SGLang's sampling parameters; from ``score_space`` on, FlashRec's own. ``null`` asks for a default."""

    n: Count | None = None
    beam_width: Count | None = None
    max_new_tokens: Count | None = None
    temperature: Temperature | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    sampling_seed: Seed | None = None

    score_space: ScoreSpaceName | None = None
    length_penalty: LengthPenalty = 1.0
    constrained: bool | None = None
    catalog: CatalogName | None = None
    exclude: list[ItemOrSid] = Field(default_factory=list)
    allow: list[ItemOrSid] | None = None


def _params_kind(value: Any) -> str | None:
    if isinstance(value, dict):
        return "<one>"
    return "<many>" if isinstance(value, list) else None


OneOrMoreParams = Annotated[
    Annotated[SamplingParams, Tag("<one>")] | Annotated[list[SamplingParams], Tag("<many>")],
    Discriminator(
        _params_kind,
        custom_error_type="params_type",
        custom_error_message="must be an object or a list of objects",
    ),
]


def _given(one: str, other: str) -> JsonValue:
    """JSON Schema: ``one`` has a value and ``other`` has none."""
    return {"required": [one], "properties": {one: {"not": {"type": "null"}}, other: {"type": "null"}}}


class GenerateRequest(UnusedGenerate):
    """The body of ``/generate``: one prompt or a list, as text or token ids."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [_given("text", "input_ids"), _given("input_ids", "text")]})

    text: TextPrompt | None = None
    input_ids: TokenPrompt | None = None
    sampling_params: OneOrMoreParams | None = None
    rid: Name | None = None
    stream: bool | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None


def prepare(context: Context, body: GenerateRequest) -> Job:
    """Validate and tokenise. Raises :class:`RequestError` naming the client's field."""
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("text", "send either text or input_ids")
    field, value = ("input_ids", body.input_ids) if body.text is None else ("text", body.text)
    prompts, batched = context.codec.prompts(field, value or [], context.config.max_prompts)
    params = _spread(SamplingParams() if body.sampling_params is None else body.sampling_params, len(prompts))
    rids = _rids(body.rid, len(prompts))
    pins = Pins(context.scheduler.engine, "sampling_params.catalog")
    requests = [_request(context.codec, pins, prompt, each) for prompt, each in zip(prompts, params, strict=True)]

    def render(results: Sequence[Result]) -> Payload | list[Payload]:
        answers = [
            _answer(context.codec, rid, each, result) for rid, each, result in zip(rids, params, results, strict=True)
        ]
        if batched and body.stream:
            return [answer | {"index": index} for index, answer in enumerate(answers)]
        return answers if batched or body.stream else answers[0]

    names = _NAMES | {"input_ids": field}
    return Job(requests=requests, render=render, names=names, timeout=body.timeout, stream=bool(body.stream), pins=pins)


def _spread(params: SamplingParams | list[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise RequestError("sampling_params", f"holds {len(params)} entries for {count} prompts")
    return params


def _rids(rid: str | list[str] | None, count: int) -> list[str]:
    """SGLang's rule: a string is the id of one prompt, and the prefix of the ids of several."""
    if isinstance(rid, list):
        if len(rid) != count:
            raise RequestError("rid", f"holds {len(rid)} ids for {count} prompts")
        return rid
    prefix = os.urandom(16).hex() if rid is None else rid
    return [prefix] if count == 1 else [f"{prefix}_{index}" for index in range(count)]


def _request(codec: TextCodec, pins: Pins, prompt: tuple[int, ...], params: SamplingParams) -> Request:
    return Request(
        input_ids=prompt,
        n=params.n or 1,
        beam_width=params.beam_width,
        max_tokens=params.max_new_tokens,
        temperature=params.temperature or 0.0,
        seed=params.sampling_seed,
        length_penalty=params.length_penalty,
        score_space=None if params.score_space is None else ScoreSpace(params.score_space),
        stop_token_ids=tuple(params.stop_token_ids or ()),
        ignore_eos=bool(params.ignore_eos),
        semantics="sglang",
        constrained=params.constrained,
        catalog=pins.label(params.catalog, params.constrained),
        **filter_fields(params.exclude, params.allow, codec, "sampling_params."),
    )


def _answer(codec: TextCodec, rid: str, params: SamplingParams, result: Result) -> dict[str, object]:
    """One prompt's answer. Scores are the engine's float32 values, written exactly."""
    leader = {
        "id": rid,
        "finish_reason": None,
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": result.completion_tokens,
        "cached_tokens": result.cached_tokens,
        "weight_version": "default",
        "score_space": result.score_space.value,
    }
    if result.catalog is not None:
        leader["catalog"] = result.catalog
    written = rows(result.beams, codec, _beam, skip_special_tokens=params.skip_special_tokens is not False)
    if not written:
        return {"text": "", "output_ids": [], "meta_info": leader | {"beam_results": []}}
    best: dict[str, Any] = orjson.loads(written[0])
    first = best | {"meta_info": leader | best["meta_info"]}
    beams = [first, *map(orjson.Fragment, written[1:])]
    return first | {"meta_info": first["meta_info"] | {"beam_results": beams}}


def _beam(fields: Fields) -> dict[str, object]:
    info: dict[str, object] = {
        "finish_reason": {"type": "stop", "matched": fields.last}
        if fields.finish_reason == "stop"
        else {"type": "length", "length": len(fields.token_ids)},
        "sequence_score": fields.score,
        "cumulative_logprob": fields.cumulative_logprob,
    }
    if fields.sid is not None:
        info["sid"], info["items"] = fields.sid, fields.items
    return {"output_ids": fields.token_ids, "text": fields.text, "meta_info": info}
