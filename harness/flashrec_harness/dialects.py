"""How a running server is asked for ranked beams: SGLang's `/generate`, ours too, or OpenAI's `/v1/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from flashrec.errors import ConfigError

GENERATE = "/generate"
COMPLETIONS = "/v1/completions"
_MISSING = (httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED)
_TIMEOUT_S = 60.0

_RANKED = (GENERATE, COMPLETIONS)
NEEDED: Mapping[str, Sequence[Sequence[str]]] = {
    "parity": [["/server_info"], [GENERATE]],
    "eval": [["/server_info"], [GENERATE]],
    "determinism": [_RANKED],
    "perf": [_RANKED],
    "trace": [[GENERATE]],
    "overload": [[GENERATE]],
    "soak": [[GENERATE], ["/v1/recommend"]],
}
"""By suite the endpoints that a judged server must have, one of each group."""
_SERVERS = (
    "a FlashRec server can be judged by every suite, SGLang by all but soak, one with OpenAI's /v1/completions alone "
    "by determinism and perf"
)


@dataclass(frozen=True, slots=True)
class Reply:
    """One beam of an answer: ``tokens`` and, where the server tells them, its sum and its score.

    Where it tells no token ids, ``tokens`` are the code points of its text.
    """

    tokens: tuple[int, ...]
    cumulative: float | None
    score: float | None


class Dialect(Protocol):
    """What one kind of endpoint wants to be sent, and where its answer holds the beams."""

    @property
    def path(self) -> str:
        """The endpoint."""
        ...

    @property
    def has_catalog(self) -> bool:
        """Whether a search may end with a catalog's semantic ID, so that its length need not be sent."""
        ...

    def body(self, prompt: Sequence[int], n: int, max_tokens: int | None) -> dict[str, Any]:
        """The request for the ``n`` best of ``prompt`` at temperature 0, of the server's own length if that is
        ``None``."""
        ...

    def beams(self, answer: Mapping[str, Any]) -> list[Reply]:
        """The ranked beams of an answer."""
        ...


class Generate:
    """SGLang's native endpoint."""

    path = GENERATE
    has_catalog = True

    def body(self, prompt: Sequence[int], n: int, max_tokens: int | None) -> dict[str, Any]:
        length = {} if max_tokens is None else {"max_new_tokens": max_tokens}
        parameters = {"n": n, "beam_width": n, "temperature": 0, **length}
        return {"input_ids": list(prompt), "sampling_params": parameters}

    def beams(self, answer: Mapping[str, Any]) -> list[Reply]:
        return [_native(beam) for beam in answer["meta_info"].get("beam_results", [answer])]


def _native(beam: Mapping[str, Any]) -> Reply:
    info = beam["meta_info"]
    score = info.get("sequence_score")
    return Reply(tuple(beam["output_ids"]), info.get("cumulative_logprob", score), score)


@dataclass(frozen=True, slots=True)
class Completions:
    """OpenAI's endpoint; the choices are the beams, in their order.

    What OpenAI has no field for is asked for in the words that servers have for it; one that knows none of them
    ignores them, or refuses the request and says why.
    """

    model: str
    path: str = COMPLETIONS
    has_catalog: bool = False

    def body(self, prompt: Sequence[int], n: int, max_tokens: int | None) -> dict[str, Any]:
        wanted: dict[str, Any] = {"model": self.model, "prompt": list(prompt), "n": n, "temperature": 0}
        wanted |= {} if max_tokens is None else {"max_tokens": max_tokens}
        return wanted | {"beam_width": n, "use_beam_search": n > 1, "return_token_ids": True}

    def beams(self, answer: Mapping[str, Any]) -> list[Reply]:
        return [_choice(choice) for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]


def _choice(choice: Mapping[str, Any]) -> Reply:
    told = choice.get("sglext") or {}
    tokens = told.get("output_ids") or choice.get("token_ids") or [ord(letter) for letter in choice["text"]]
    score = told.get("sequence_score")
    return Reply(tuple(tokens), told.get("cumulative_logprob", score), score)


def dialect_of(url: str) -> Dialect:
    """The dialect of the server at ``url``: ``/generate`` if it is there.

    Raises:
        ConfigError: the server has neither endpoint, or names no model.
        httpx.HTTPError: it does not answer.
    """
    with _client(url) as client:
        if _has(client, GENERATE):
            return Generate()
        if _has(client, COMPLETIONS):
            return Completions(_model(client))
    raise ConfigError(f"--url {url}: it has neither {GENERATE} nor {COMPLETIONS}; {_SERVERS}")


def require(suite: str, url: str) -> None:
    """Raise :class:`ConfigError` where no server answers at ``url``, or it lacks an endpoint that ``suite`` asks."""
    try:
        with _client(url) as client:
            lacking = [group for group in NEEDED.get(suite, []) if not any(_has(client, path) for path in group)]
    except httpx.HTTPError as error:
        raise ConfigError(f"--url {url}: no server answers there ({error}); start one, or leave --url out") from None
    if lacking:
        raise ConfigError(f"--url {url}: {suite} needs {' or '.join(lacking[0])}, which is not there; {_SERVERS}")


def _client(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=_TIMEOUT_S, trust_env=False)


def _has(client: httpx.Client, path: str) -> bool:
    """Whether there is such an endpoint; an empty body asks it for nothing."""
    answer = client.get(path) if path == "/server_info" else client.post(path, json={})
    return answer.status_code not in _MISSING


def _model(client: httpx.Client) -> str:
    answer = client.get("/v1/models")
    try:
        return str(answer.raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPStatusError, ValueError, KeyError, IndexError, TypeError):
        raise ConfigError(f"--url {client.base_url}: /v1/models names no model for {COMPLETIONS} to run") from None
