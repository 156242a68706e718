"""A validated request on its way into a wave, and the rules that validate it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flashrec.errors import RequestError
from flashrec.kvcache.radix import PageNode
from flashrec.request import Request, ScoreSpace
from flashrec.search.filters import LeafFilter, resolve_filter
from flashrec.sid.catalog import Catalog
from flashrec.sid.layout import SidLayout

MIN_TEMPERATURE = 1e-3
"""Below it, float32 logits over the temperature lose what tells neighbouring candidates apart."""

MAX_LENGTH_PENALTY = 16.0
"""Scores stay finite in float32 up to it, either way; the longest search has 64 tokens."""


@dataclass(frozen=True, slots=True)
class WaveKey:
    """What the requests of a wave must share: one search depth and one score space."""

    constrained: bool
    space: ScoreSpace
    steps: int


@dataclass(slots=True, eq=False)
class Member:
    """One request of a wave. ``tokens`` int32 is its prompt with the begin token that the engine appended.

    ``path`` are the cached pages that it reads, ``pages`` all its pages in order and ``cached`` the tokens that
    the cache holds, set on admission.
    """

    request: Request
    tokens: NDArray[np.int32]
    width: int
    key: WaveKey
    stop_tokens: tuple[int, ...]
    leaf_filter: LeafFilter | None
    path: list[PageNode] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    cached: int = 0

    @property
    def length(self) -> int:
        """Prompt tokens, the begin token included."""
        return len(self.tokens)

    @property
    def filter_keys(self) -> int:
        """SIDs that the request's filter names."""
        return 0 if self.leaf_filter is None else len(self.leaf_filter.ranks)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may ask for on this engine."""

    vocab_size: int
    max_context: int
    max_beam_width: int
    max_decode_steps: int
    default_space: ScoreSpace
    score_end: bool
    eos_token_ids: tuple[int, ...]


def validate(request: Request, limits: Limits, layout: SidLayout | None, catalog: Catalog | None) -> Member:
    """Check every field against the engine (SPEC B1a, V4) and resolve what depends on the catalog.

    Raises:
        RequestError: naming the first field that is wrong.
    """
    constrained = catalog is not None if request.constrained is None else request.constrained
    if constrained and (catalog is None or layout is None):
        raise RequestError("constrained", "the engine has no catalog; start it with --sid-vocab-file")
    width = _width(request, limits)
    _check_numbers(request)
    tokens = _prompt(request.input_ids, limits, layout.begin if constrained and layout else None)
    space = _space(request, limits, constrained)
    if constrained:
        assert catalog is not None
        assert layout is not None
        steps = catalog.depth + (1 if limits.score_end else 0)
        _check_max_tokens(request.max_tokens, emitted_tokens(catalog, layout))
        leaf_filter = resolve_filter(request, catalog)
        stop_tokens: tuple[int, ...] = ()
    else:
        steps = _free_steps(request, limits, width)
        leaf_filter = None
        stop_tokens = _stop_tokens(request, limits)
        _refuse_catalog_fields(request)
    return Member(
        request=request,
        tokens=tokens,
        width=width,
        key=WaveKey(constrained, space, steps),
        stop_tokens=stop_tokens,
        leaf_filter=leaf_filter,
    )


def emitted_tokens(catalog: Catalog, layout: SidLayout) -> int:
    """Tokens of a whole SID: its codes and, where the layout has one, the end token."""
    return catalog.depth + (1 if layout.end is not None else 0)


def _width(request: Request, limits: Limits) -> int:
    if request.n < 1:
        raise RequestError("n", f"must be at least 1, got {request.n}")
    width = request.n if request.beam_width is None else request.beam_width
    if width < 1:
        raise RequestError("beam_width", f"must be at least 1, got {width}")
    if request.n > width:
        raise RequestError("n", f"{request.n} results cannot come from a beam_width of {width}")
    if width > limits.max_beam_width:
        field_name = "n" if request.beam_width is None else "beam_width"
        raise RequestError(field_name, f"{width} is above this engine's max_beam_width of {limits.max_beam_width}")
    return width


def _check_numbers(request: Request) -> None:
    if not math.isfinite(request.temperature) or request.temperature < 0:
        raise RequestError("temperature", f"must be a finite number of at least 0, got {request.temperature}")
    if 0 < request.temperature < MIN_TEMPERATURE:
        raise RequestError("temperature", f"{request.temperature} is below {MIN_TEMPERATURE}; use 0 for no sampling")
    if not abs(request.length_penalty) <= MAX_LENGTH_PENALTY:
        bound = f"{MAX_LENGTH_PENALTY:g}"
        raise RequestError(
            "length_penalty", f"must be a finite number in -{bound} .. {bound}, got {request.length_penalty}"
        )
    if request.seed is not None and not -(2**63) <= request.seed < 2**63:
        raise RequestError("seed", f"must fit 64 bits, got {request.seed}")


def _prompt(input_ids: Sequence[int], limits: Limits, begin: int | None) -> NDArray[np.int32]:
    if len(input_ids) == 0:
        raise RequestError("input_ids", "the prompt is empty")
    ids = np.asarray(input_ids)
    if ids.dtype.kind not in "iu":
        raise RequestError("input_ids", "token ids must be 64-bit integers")
    outside = (ids < 0) | (ids >= limits.vocab_size)
    if outside.any():
        where = int(np.argmax(outside))
        raise RequestError(
            "input_ids", f"token id {ids[where]} at position {where} is outside 0 .. {limits.vocab_size - 1}"
        )
    if begin is not None and ids[-1] != begin:
        ids = np.append(ids, begin)
    if len(ids) > limits.max_context:
        raise RequestError(
            "input_ids", f"{len(ids)} tokens are above this engine's max_context of {limits.max_context}"
        )
    return ids.astype(np.int32)


def _space(request: Request, limits: Limits, constrained: bool) -> ScoreSpace:
    if constrained:
        return request.score_space or limits.default_space
    if request.score_space not in (None, ScoreSpace.VOCAB):
        raise RequestError("score_space", f"{request.score_space} needs a catalog; without one it is vocab")
    return ScoreSpace.VOCAB


def _check_max_tokens(max_tokens: int | None, needed: int) -> None:
    """Less than a SID is an error; more is a SID, and the search says ``stop``."""
    if max_tokens is not None and max_tokens < needed:
        raise RequestError("max_tokens", f"{max_tokens} is less than a semantic ID of this catalog, {needed} tokens")


def _free_steps(request: Request, limits: Limits, width: int) -> int:
    if request.max_tokens is None:
        raise RequestError("max_tokens", "is required for a search without a catalog")
    steps = request.max_tokens
    if not 1 <= steps <= limits.max_decode_steps:
        raise RequestError("max_tokens", f"must be 1 .. {limits.max_decode_steps} (max_decode_steps), got {steps}")
    if request.temperature > 0:
        raise RequestError("temperature", "sampling needs a catalog; without one only 0 is supported")
    if 2 * width > limits.vocab_size:
        raise RequestError("beam_width", f"twice {width} is above the vocabulary of {limits.vocab_size}")
    return steps


def _stop_tokens(request: Request, limits: Limits) -> tuple[int, ...]:
    bad = [token for token in request.stop_token_ids if not 0 <= token < limits.vocab_size]
    if bad:
        raise RequestError("stop_token_ids", f"token id {bad[0]} is outside 0 .. {limits.vocab_size - 1}")
    if request.ignore_eos:
        # SGLang's ignore_eos drops the request's own stop tokens as well.
        return () if request.semantics == "sglang" else tuple(request.stop_token_ids)
    return tuple(sorted({*request.stop_token_ids, *limits.eos_token_ids}))


def _refuse_catalog_fields(request: Request) -> None:
    for name in ("exclude_sids", "exclude_items"):
        if getattr(request, name):
            raise RequestError(name, "needs a catalog")
    for name in ("allow_sids", "allow_items"):
        if getattr(request, name) is not None:
            raise RequestError(name, "needs a catalog")
