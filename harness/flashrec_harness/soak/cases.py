"""The requests of a soak: all search endpoints, narrow and wide, and what of an answer must never change."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from flashrec_harness.material import Material

WIDEST = 64
_VOLATILE = frozenset({"id", "created", "cached_tokens", "catalog"})
"""Names of what differs between two answers to one request: ids, times, the cache's temperature, a reload's count."""

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One request that is sent again and again; ``n`` is its widest beam."""

    name: str
    path: str
    n: int
    payload: bytes


def roster(material: Material, count: int, seed: int, *, longest: int) -> list[Case]:
    """``count`` different requests over the endpoints that the checkpoint can serve, seeded.

    Prompts come from real histories, where there are any, and, up to ``longest`` tokens, from random ids; widths from 1
    to 64.
    """
    rng = random.Random(seed)
    makers = [_generate, _generate_batch, _completion]
    if material.catalog is not None:
        makers += [_sampled, _filtered, _streamed, _recommend, *([_chat] if material.tokenizer.chat_template else [])]
    source = _Source(material, rng, longest)
    cases = []
    for index in range(count):
        maker = makers[index % len(makers)]
        n = (1, WIDEST)[index % 2] if index < 2 else rng.choice((1, 2, 4, 8, 16, 32, rng.randint(1, WIDEST)))
        path, body = maker(source, n)
        name = f"{index}: {path}{maker.__name__.replace('_', ' ')}, n = {n}"
        cases.append(Case(name, path, n, orjson.dumps(body)))
    return cases


class _Source:
    """Draws prompts and items."""

    def __init__(self, material: Material, rng: random.Random, longest: int) -> None:
        self.rng = rng
        self._longest = longest
        self._vocabulary = len(material.tokenizer)
        self.constrained = material.catalog is not None
        told = self.constrained and material.sequences.is_file()
        self._prompts = material.history_prompts(64) if told else []
        self.histories: list[Sequence[str]] = [history.items for history in material.histories[:64]] if told else []
        if material.catalog is not None and not told:
            items = material.catalog.items
            self.histories = [[items[rng.randrange(len(items))] for _ in range(64)]]

    def ids(self) -> list[int]:
        if self._prompts and self.rng.random() < 0.5:
            return list(self.rng.choice(self._prompts))
        return [self.rng.randrange(self._vocabulary) for _ in range(self.rng.randint(1, self._longest))]

    def items(self, most: int) -> list[str]:
        return [self.rng.choice(self.rng.choice(self.histories)) for _ in range(self.rng.randint(1, most))]

    def limit(self, name: str) -> Body:
        """Without a catalog a search needs its length."""
        return {} if self.constrained else {name: 3}


def _generate(source: _Source, n: int) -> tuple[str, Body]:
    params = {"n": n, "temperature": 0, **source.limit("max_new_tokens")}
    if source.constrained:
        params["score_space"] = source.rng.choice(("sid", "level", "children"))
    return "/generate", {"input_ids": source.ids(), "sampling_params": params}


def _generate_batch(source: _Source, n: int) -> tuple[str, Body]:
    prompts = [source.ids() for _ in range(source.rng.randint(2, 3))]
    params = {"n": max(1, n // 2), "beam_width": n, **source.limit("max_new_tokens")}
    return "/generate", {"input_ids": prompts, "sampling_params": params}


def _completion(source: _Source, n: int) -> tuple[str, Body]:
    """A search without the catalog."""
    free = {"constrained": False} if source.constrained else {}
    return "/v1/completions", {"prompt": source.ids(), "n": n, "max_tokens": 3, **free}


def _sampled(source: _Source, n: int) -> tuple[str, Body]:
    return "/v1/completions", {"prompt": source.ids(), "n": n, "temperature": 1.0, "seed": source.rng.randrange(1000)}


def _filtered(source: _Source, n: int) -> tuple[str, Body]:
    name = source.rng.choice(("exclude", "allow"))
    return "/v1/completions", {"prompt": source.ids(), "n": n, name: source.items(20)}


def _streamed(source: _Source, n: int) -> tuple[str, Body]:
    return "/generate", {"input_ids": source.ids(), "sampling_params": {"n": n}, "stream": True}


def _recommend(source: _Source, n: int) -> tuple[str, Body]:
    return "/v1/recommend", {"history": source.items(8), "k": n, "exclude_history": source.rng.random() < 0.5}


def _chat(source: _Source, n: int) -> tuple[str, Body]:
    content = f"Bought so far, oldest first: {' '.join(source.items(6))}"
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": content}], "n": n}


def digest(content: bytes) -> str:
    """16 hex digits over everything in an answer but what differs between two answers to one request.

    ``content`` is JSON, or server-sent events that hold it.
    """
    if content.startswith(b"data: "):
        events = [event for event in content.split(b"\n\n") if event and event != b"data: [DONE]"]
        answer: Any = [orjson.loads(event.removeprefix(b"data: ")) for event in events]
    else:
        answer = orjson.loads(content)
    return hashlib.sha256(orjson.dumps(_lasting(answer), option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]


def _lasting(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lasting(entry) for key, entry in value.items() if key not in _VOLATILE}
    if isinstance(value, list):
        return [_lasting(entry) for entry in value]
    return value


Ask = Callable[[Case], bytes]


def alone(cases: Sequence[Case], ask: Ask) -> dict[str, str]:
    """Each case's digest when nothing else runs, by its name."""
    return {case.name: digest(ask(case)) for case in cases}
