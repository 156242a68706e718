"""OpenAI's ``/v1/chat/completions`` and ``/v1/completions``: a search's ranked beams as ``n`` choices."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import Discriminator, Field, Tag

from flashrec.errors import RequestError
from flashrec.request import Request, Result, ScoreSpace
from flashrec.server.context import Context
from flashrec.server.errors import ApiError
from flashrec.server.filters import filter_fields, filter_names
from flashrec.server.jobs import Job, Payload
from flashrec.server.pins import Pins
from flashrec.server.rows import Fields, rows
from flashrec.server.schemas import (
    Body,
    Count,
    Prompt,
    SearchOptions,
    TokenIds,
)
from flashrec.server.unused import Unused, UnusedChat, UnusedCompletion, UnusedFlag


class StreamOptions(Body):
    """Whether the last event of a stream holds the usage."""

    include_usage: bool | None = None
    include_obfuscation: UnusedFlag = None
    continuous_usage_stats: UnusedFlag = None


class _CompletionFields(UnusedCompletion, SearchOptions):
    """What both endpoints take; the unused ones pass with the value that asks for nothing."""

    model: str | None = None
    n: Count | None = None
    max_tokens: Count | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    constrained: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class TextPart(Body):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


def _content_kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    return "<many>" if isinstance(value, list) else None


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    name: Unused = None
    content: Annotated[
        Annotated[str, Tag("<text>")] | Annotated[list[TextPart], Tag("<many>")],
        Discriminator(
            _content_kind,
            custom_error_type="content_type",
            custom_error_message="must be a string or a list of text parts",
        ),
    ]

    def as_template_input(self) -> dict[str, str]:
        """What chat templates take."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        # OpenAI's newer word for the same role; templates know the older one.
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": text}


class ChatCompletionRequest(_CompletionFields, UnusedChat):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None


class CompletionRequest(_CompletionFields):
    """The body of ``/v1/completions``."""

    prompt: Prompt
    best_of: Count | None = None
    echo: UnusedFlag = None
    suffix: Unused = None
    logprobs: Unused = None


ChoiceOf = Callable[[Any, Any, str], dict[str, object]]
"""From a choice's index, text and finish reason to its JSON, less ``sglext``."""


def prepare_chat(context: Context, body: ChatCompletionRequest) -> Job:
    """Validate, apply the chat template, tokenise. Raises :class:`RequestError`."""
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise RequestError("max_tokens", "contradicts max_completion_tokens: send one of them")
    limit = "max_completion_tokens" if body.max_tokens is None else "max_tokens"
    text = context.codec.chat([message.as_template_input() for message in body.messages])
    prompt = context.codec.encode(text, add_special_tokens=False)
    names = {"input_ids": "messages", "max_tokens": limit}
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    pins = Pins(context.scheduler.engine)
    request = _request(context, pins, body, prompt, body.max_tokens or body.max_completion_tokens)

    def choice(index: Any, text: Any, finish_reason: str) -> dict[str, object]:
        part = "delta" if body.stream else "message"
        message = {"role": "assistant", "content": text}
        return {"index": index, part: message, "logprobs": None, "finish_reason": finish_reason}

    return _job(context, pins, body, [request], names, ("chatcmpl", kind), choice)


def prepare_completion(context: Context, body: CompletionRequest) -> Job:
    """Validate and tokenise; choice ``n * p + i`` is beam ``i`` of prompt ``p``."""
    if body.best_of not in (None, body.n or 1):
        raise RequestError("best_of", "must equal n: send beam_width to search wider than n")
    prompts, _ = context.codec.prompts("prompt", body.prompt, context.config.max_prompts)
    pins = Pins(context.scheduler.engine)
    requests = [_request(context, pins, body, prompt, body.max_tokens) for prompt in prompts]

    def choice(index: Any, text: Any, finish_reason: str) -> dict[str, object]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}

    return _job(context, pins, body, requests, {"input_ids": "prompt"}, ("cmpl", "text_completion"), choice)


def _request(
    context: Context, pins: Pins, body: _CompletionFields, prompt: tuple[int, ...], max_tokens: int | None
) -> Request:
    if body.model is not None and body.model not in context.model_aliases:
        raise ApiError(
            404,
            "model_not_found",
            f"model: {body.model[:200]!r} is not served here, {context.model_name!r} is",
            "model",
        )
    return Request(
        input_ids=prompt,
        n=body.n or 1,
        beam_width=body.beam_width,
        max_tokens=max_tokens,
        temperature=body.temperature or 0.0,
        seed=body.seed,
        length_penalty=body.length_penalty,
        score_space=None if body.score_space is None else ScoreSpace(body.score_space),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        constrained=body.constrained,
        catalog=pins.label(body.catalog, body.constrained),
        **filter_fields(body.exclude, body.allow, context.codec),
    )


def _job(
    context: Context,
    pins: Pins,
    body: _CompletionFields,
    requests: Sequence[Request],
    names: dict[str, str],
    kind: tuple[str, str],
    choice_of: ChoiceOf,
) -> Job:
    prefix, object_name = kind
    head: dict[str, object] = {
        "id": f"{prefix}-{os.urandom(16).hex()}",
        "object": object_name,
        "created": int(time.time()),
        "model": context.model_name,
    }

    def choices(results: Sequence[Result]) -> list[orjson.Fragment]:
        ranked = list[bytes]()
        for position, result in enumerate(results):

            def shape(fields: Fields, catalog: str | None = result.catalog) -> dict[str, object]:
                choice = choice_of(fields.number, fields.text, fields.finish_reason)
                return choice | {"sglext": _extension(fields, catalog)}

            first = position * requests[0].n
            skipping = body.skip_special_tokens is not False
            ranked += rows(result.beams, context.codec, shape, first=first, skip_special_tokens=skipping)
        return list(map(orjson.Fragment, ranked))

    def render(results: Sequence[Result]) -> Payload | list[Payload]:
        if not body.stream:
            return head | {"choices": choices(results), "usage": usage(results)}
        wanted = body.stream_options is not None and body.stream_options.include_usage
        quiet: dict[str, object] = {"usage": None} if wanted else {}
        events: list[Payload] = [head | {"choices": [choice]} | quiet for choice in choices(results)]
        if wanted:
            events.append(head | {"choices": [], "usage": usage(results)})
        return events

    return Job(
        requests=requests,
        render=render,
        names=filter_names() | names,
        timeout=body.timeout,
        stream=bool(body.stream),
        pins=pins,
    )


def _extension(fields: Fields, catalog: str | None) -> dict[str, object]:
    """A choice's ``sglext``: scores (exact float32 values), tokens, and the SID, items and catalog if any."""
    shown: dict[str, object] = {
        "sequence_score": fields.score,
        "cumulative_logprob": fields.cumulative_logprob,
        "output_ids": fields.token_ids,
    }
    if fields.sid is not None:
        shown |= {"sid": fields.sid, "items": fields.items, "catalog": catalog}
    return shown


def usage(results: Sequence[Result]) -> dict[str, object]:
    """OpenAI's usage: prompts counted once each, completions over all returned beams."""
    prompt = sum(result.prompt_tokens for result in results)
    completion = sum(result.completion_tokens for result in results)
    cached = sum(result.cached_tokens for result in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
