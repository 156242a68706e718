"""What goes into a wave and what comes out of it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Literal, NamedTuple, Protocol, overload

import numpy as np
from numpy.typing import NDArray


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
    """One prompt to search from. ``None`` means: the engine's default; for ``seed`` that is 0, so that a request
    that samples repeats itself too.

    A semantic ID is the tuple of its 0-based codes, one per level. ``exclude_*`` names what must not be
    returned; ``allow_*`` restricts the search to the union of both lists. ``catalog`` is a served catalog's name, or
    the ``name@revision`` that an earlier answer reported.
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
    catalog: str | None = None
    rid: str = ""

    def named(self, rid: str) -> Request:
        """The same request under another id."""
        copy = object.__new__(Request)
        copy.__setstate__((*_state(self)[:-1], rid))
        return copy

    # Fronts send each request to the engine's process: dataclass's own methods, which list the fields anew each time,
    # take twice as long (Intel Xeon, 2026-12-02).
    def __getstate__(self) -> tuple[object, ...]:
        return _state(self)

    def __setstate__(self, state: tuple[object, ...]) -> None:
        for place, value in zip(_PLACES, state, strict=True):
            place.__set__(self, value)


_FIELDS = tuple(field.name for field in fields(Request))
_state: Callable[[Request], tuple[object, ...]] = operator.attrgetter(*_FIELDS)
_PLACES = tuple(vars(Request)[name] for name in _FIELDS)


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


class BeamArrays(NamedTuple):
    """A request's beams as arrays, best first: ``token_ids`` int32 [n, length], ``cumulative_logprob`` and ``score``
    float32 [n], and ``ranks`` int32 [n], their rows in the catalog."""

    token_ids: NDArray[np.int32]
    cumulative_logprob: NDArray[np.float32]
    score: NDArray[np.float32]
    ranks: NDArray[np.int32]


class JsonColumn(NamedTuple):
    """A field of several objects as JSON: each of ``values`` stands between ``opening`` and ``closing``."""

    values: Iterable[bytes]
    opening: bytes = b""
    closing: bytes = b""


class BeamColumns(NamedTuple):
    """A request's beams, best first, as what an answer shows of them: ``token_ids`` int32 [n, length],
    ``cumulative_logprob`` and ``score`` float32 [n], ``sids`` int32 [n, depth] and the list of each one's ``items``."""

    token_ids: NDArray[np.int32]
    cumulative_logprob: NDArray[np.float32]
    score: NDArray[np.float32]
    sids: NDArray[np.int32]
    items: JsonColumn


class BeamSource(Protocol):
    """What :class:`LazyBeams` are made from: the beams of several requests, in the order of the requests."""

    def beams_of(self, index: int) -> Sequence[Beam]:
        """The beams of request ``index``, an object for each."""
        ...

    def arrays_of(self, index: int) -> BeamArrays:
        """The same as arrays."""
        ...

    def columns_of(self, index: int) -> BeamColumns:
        """The same as columns."""
        ...

    def found_of(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """``ranks`` and ``cumulative_logprob`` of those arrays, from which all else follows."""
        ...


class LazyBeams(Sequence[Beam]):
    """Request ``index``'s beams of ``source``, made when they are first looked at; equal to any sequence of equal
    beams."""

    def __init__(self, source: BeamSource, index: int) -> None:
        self._source = source
        self._index = index

    def arrays(self) -> BeamArrays:
        """The beams without an object for each."""
        return self._source.arrays_of(self._index)

    def columns(self) -> BeamColumns:
        """As :meth:`arrays`, with items."""
        return self._source.columns_of(self._index)

    def found(self) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """``ranks`` int32 and ``cumulative_logprob`` float32, [n] both: what no catalog knows."""
        return self._source.found_of(self._index)

    @functools.cached_property
    def _beams(self) -> tuple[Beam, ...]:
        return tuple(self._source.beams_of(self._index))

    @overload
    def __getitem__(self, index: int) -> Beam: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Beam, ...]: ...
    def __getitem__(self, index: int | slice) -> Beam | tuple[Beam, ...]:
        return self._beams[index]

    def __len__(self) -> int:
        return len(self.found()[0])

    def __iter__(self) -> Iterator[Beam]:
        return iter(self._beams)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._beams == tuple(other)

    def __hash__(self) -> int:
        return hash(self._beams)

    def __repr__(self) -> str:
        return repr(self._beams)


@dataclass(frozen=True, slots=True)
class Result:
    """The ranked beams of one request, with what its wave spent on it.

    ``catalog`` is the ``name@revision`` that it was searched in, ``None`` without a catalog.
    """

    rid: str
    beams: Sequence[Beam]
    prompt_tokens: int
    cached_tokens: int
    score_space: ScoreSpace
    catalog: str | None = None

    @property
    def completion_tokens(self) -> int:
        """Tokens of all beams."""
        if isinstance(self.beams, LazyBeams):
            return self.beams.arrays().token_ids.size
        return sum(len(beam.token_ids) for beam in self.beams)
