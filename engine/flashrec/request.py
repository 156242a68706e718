"""What goes into a wave and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple


class ScoreSpace(StrEnum):
    """What the softmax of a step is normalised over (SPEC B3)."""

    VOCAB = "vocab"
    SID = "sid"
    LEVEL = "level"
    CHILDREN = "children"


Semantics = Literal["transformers", "sglang"]
"""How a search without a catalog ranks finished beams: see :mod:`flashrec.search.free`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to search from. ``None`` means: the engine's default.

    A semantic ID is the tuple of its 0-based codes, one per level. ``exclude_*`` names what must not be
    returned; ``allow_*`` restricts the search to the union of both lists.
    """

    input_ids: tuple[int, ...]
    n: int = 1
    beam_width: int | None = None
    max_tokens: int | None = None
    temperature: float = 0.0
    seed: int | None = None
    length_penalty: float = 1.0
    score_space: ScoreSpace | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    semantics: Semantics = "transformers"
    constrained: bool | None = None
    exclude_sids: tuple[tuple[int, ...], ...] = ()
    exclude_items: tuple[str, ...] = ()
    allow_sids: tuple[tuple[int, ...], ...] | None = None
    allow_items: tuple[str, ...] | None = None
    rid: str = ""


class Beam(NamedTuple):
    """One hypothesis, best first in :attr:`Result.beams`.

    ``token_ids`` are the emitted tokens (an appended begin token is prompt, an implied end token is
    emitted). ``cumulative_logprob`` is the float32 sum of their log-probabilities in the score space and
    ``score`` that sum over ``length ** length_penalty``. ``sid`` and ``items`` are set with a catalog.
    """

    token_ids: tuple[int, ...]
    cumulative_logprob: float
    score: float
    finish_reason: Literal["length", "stop"]
    sid: tuple[int, ...] | None = None
    items: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """The ranked beams of one request, with what its wave spent on it."""

    rid: str
    beams: tuple[Beam, ...]
    prompt_tokens: int
    cached_tokens: int
    score_space: ScoreSpace
