"""A validated request on its way into a wave, and the rules that validate it."""

from __future__ import annotations

import math
import numbers
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flashrec.errors import RequestError
from flashrec.kvcache.radix import PageNode
from flashrec.request import Request, ScoreSpace
from flashrec.runtime.catalogs import ServedCatalog
from flashrec.search.filters import LeafFilter, resolve_filter
from flashrec.sid.catalog import Catalog
from flashrec.sid.layout import SidLayout

MIN_TEMPERATURE = 1e-3
"""Below it, float32 logits over the temperature lose what tells neighbouring candidates apart."""

MAX_STOP_TOKENS = 64
"""A search without a catalog ranks ``1 + stop tokens`` candidates per beam, in tensors of that size."""

MAX_LENGTH_PENALTY = 16.0
"""Scores stay finite in float32 up to it, either way; the longest search has 64 tokens."""


_KINDS: tuple[tuple[tuple[str, ...], tuple[type, ...], str], ...] = (
    (("n", "beam_width", "max_tokens", "seed"), (int, numbers.Integral), "an integer"),
    (("temperature", "length_penalty"), (float, int, numbers.Real), "a number"),
)
_OPTIONAL = frozenset({"beam_width", "max_tokens", "seed"})


class WaveKey(NamedTuple):
    """What the requests of a wave must share: one search depth, one score space, one revision of a catalog (from 1).

    Requests that sample keep to themselves: they are scored by other operations, whose last bits differ from the
    trie kernel's (H200, 2026-11-30), so that a request at temperature 0 must never be in their wave.
    """

    constrained: bool
    space: ScoreSpace
    steps: int
    revision: int = 0
    sampled: bool = False


@dataclass(slots=True, eq=False)
class Member:
    """One request of a wave. ``tokens`` int32 is its prompt with the begin token that the engine appended.

    Set on admission: ``pages`` are all its pages in order, ``path`` those of the cache that it keeps from eviction,
    ``own`` those that go back to the pool with it, and ``cached`` counts the tokens that the cache held. ``served``
    is what it is searched in, whatever its name stands for by then.
    ``turn`` and ``late`` are when it is due and when overdue, in seconds of its queue's clock; without a queue the
    order of the requests decides.
    """

    request: Request
    tokens: NDArray[np.int32]
    width: int
    key: WaveKey
    stop_tokens: tuple[int, ...]
    leaf_filter: LeafFilter | None
    served: ServedCatalog | None = None
    turn: float = 0.0
    late: float = math.inf
    path: list[PageNode] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
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
    eos_token_ids: tuple[int, ...]


def validate(request: Request, limits: Limits, served: ServedCatalog | None) -> Member:
    """Check every field against the engine (SPEC B1a, V4) and resolve what depends on the catalog ``served``.

    Raises:
        RequestError: naming the first field that is wrong.
    """
    _check_types(request)
    if request.constrained and served is None:
        raise RequestError("constrained", "the engine has no catalog; start it with --sid-vocab-file")
    if request.constrained is False:
        served = None
    constrained = served is not None
    width = _width(request, limits)
    _check_numbers(request)
    tokens = _prompt(request.input_ids, limits, None if served is None else served.layout.begin)
    space = _space(request, limits, constrained)
    if served is not None:
        steps = len(served.tries)
        _check_max_tokens(request.max_tokens, emitted_tokens(served.catalog, served.layout))
        leaf_filter = resolve_filter(request, served.catalog)
        _check_no_stop_inside(request.stop_token_ids, served.layout, limits)
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
        key=WaveKey(
            constrained, space, steps, 0 if served is None else served.revision, sampled=request.temperature > 0
        ),
        stop_tokens=stop_tokens,
        leaf_filter=leaf_filter,
        served=served,
    )


def emitted_tokens(catalog: Catalog, layout: SidLayout) -> int:
    """Tokens of a whole SID: its codes and, where the layout has one, the end token."""
    return catalog.depth + (1 if layout.end is not None else 0)


def _check_types(request: Request) -> None:
    for names, kind, words in _KINDS:
        for name in names:
            value = getattr(request, name)
            given = value is not None or name not in _OPTIONAL
            if given and (not isinstance(value, kind) or isinstance(value, bool)):
                raise RequestError(name, f"must be {words}, got {value!r}")


def _width(request: Request, limits: Limits) -> int:
    if request.n < 1:
        raise RequestError("n", f"must be at least 1, got {request.n}")
    width = request.n if request.beam_width is None else request.beam_width
    if width < 1:
        raise RequestError("beam_width", f"must be at least 1, got {width}")
    if request.n > width:
        raise RequestError("n", f"{request.n} results cannot come from a beam_width of {width}")
    if width > limits.max_beam_width:
        limit = f"this engine's max_beam_width of {limits.max_beam_width}"
        raise RequestError(_width_field(request), f"{width} is above {limit}")
    return width


def _width_field(request: Request) -> str:
    """The field that says how many beams there are: results, where no width was asked for."""
    return "n" if request.beam_width is None else "beam_width"


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
    if begin is not None and input_ids[-1] != begin:
        input_ids = (*input_ids, begin)
    try:
        # A third of the time of np.asarray, which must find out a type first.
        ids = np.frombuffer(struct.pack(f"={len(input_ids)}q", *input_ids), dtype=np.int64)
    except struct.error:
        raise RequestError("input_ids", "token ids must be 64-bit integers") from None
    unsigned = ids.view(np.uint64)  # a negative one is large there
    if unsigned.max() >= limits.vocab_size:
        where = int(np.argmax(unsigned >= limits.vocab_size))
        raise RequestError(
            "input_ids", f"token id {ids[where]} at position {where} is outside 0 .. {limits.vocab_size - 1}"
        )
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
        raise RequestError(_width_field(request), f"twice {width} is above the vocabulary of {limits.vocab_size}")
    return steps


def _stop_tokens(request: Request, limits: Limits) -> tuple[int, ...]:
    _check_in_vocabulary(request.stop_token_ids, limits)
    if request.ignore_eos:
        # SGLang's ignore_eos drops the request's own stop tokens as well.
        return () if request.semantics == "sglang" else tuple(request.stop_token_ids)
    return tuple(sorted({*request.stop_token_ids, *limits.eos_token_ids}))


def _check_no_stop_inside(stop_token_ids: Sequence[int], layout: SidLayout, limits: Limits) -> None:
    """A catalog search ends with its SID: stop tokens change nothing there, unless they are a SID's own."""
    _check_in_vocabulary(stop_token_ids, limits)
    inside = sorted(set(stop_token_ids).intersection(layout.sid_tokens.tolist())) if stop_token_ids else []
    if inside:
        raise RequestError("stop_token_ids", f"token id {inside[0]} is part of semantic IDs, which are returned whole")


def _check_in_vocabulary(stop_token_ids: Sequence[int], limits: Limits) -> None:
    count = len(stop_token_ids)
    if count > MAX_STOP_TOKENS:
        raise RequestError("stop_token_ids", f"{count} token ids are above the limit of {MAX_STOP_TOKENS}")
    bad = [token for token in stop_token_ids if not 0 <= token < limits.vocab_size]
    if bad:
        raise RequestError("stop_token_ids", f"token id {bad[0]} is outside 0 .. {limits.vocab_size - 1}")


def _refuse_catalog_fields(request: Request) -> None:
    for name in ("exclude_sids", "exclude_items"):
        if getattr(request, name):
            raise RequestError(name, "needs a catalog")
    for name in ("allow_sids", "allow_items"):
        if getattr(request, name) is not None:
            raise RequestError(name, "needs a catalog")
    if request.catalog is not None:
        raise RequestError("catalog", "contradicts constrained: leave one of them out")
