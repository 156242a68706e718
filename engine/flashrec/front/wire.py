"""What a front and the engine's process say to each other, over a pipe that nobody else can open.

Named tuples: a request of 303 tokens and its answer of 50 beams are pickled and read in 20 us, in 29 as dataclasses
with slots (Intel Xeon, 2026-12-02).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flashrec.config import EngineConfig
from flashrec.errors import FlashRecError
from flashrec.request import LazyBeams, Request, Result, ScoreSpace
from flashrec.sid.layout import SidLayout


class Submit(NamedTuple):
    """Front: queue all of these requests, or none. ``deadline`` is on the machine's monotonic clock."""

    requests: Sequence[Request]
    deadline: float | None


class Cancel(NamedTuple):
    """Front: nobody waits for this request any more."""

    rid: str


class Call(NamedTuple):
    """Front: run an operation of the scheduler or the engine; :class:`Reply` has the same ``number``."""

    number: int
    operation: str
    arguments: dict[str, Any]


class Ready(NamedTuple):
    """Front: serving; or why not."""

    error: FlashRecError | None = None


class Taken(NamedTuple):
    """Front: :class:`Serve` of that number is in force."""

    number: int


class LetGo(NamedTuple):
    """Front: nothing here holds this revision of a catalog any more, and nothing will ask for it."""

    revision: int


class StoredCatalog(NamedTuple):
    """A revision of a catalog whose arrays lie in the files of ``directory``: see :mod:`.stored`."""

    name: str
    revision: int
    device_bytes: int
    directory: Path


class StoredPlace(NamedTuple):
    """What a name stands for."""

    active: StoredCatalog
    standby: StoredCatalog | None = None


class Hello(NamedTuple):
    """Engine: what a front needs to know before it serves."""

    engine_config: EngineConfig
    layout: SidLayout | None


class Serve(NamedTuple):
    """Engine: the catalogs from now on."""

    number: int
    places: dict[str, StoredPlace]


class FoundSids(NamedTuple):
    """The beams of a search in a catalog: their rows in it, int32 [n], and their scores' sums, float32 [n].

    As bytes: 31 results of 50 beams take 0.28 ms to pickle, as arrays 0.64, and reading eight of them 52 us against 130
    (AMD EPYC, 2026-12-01).
    """

    ranks: bytes
    totals: bytes

    @classmethod
    def of(cls, ranks: NDArray[np.int32], totals: NDArray[np.float32]) -> FoundSids:
        return cls(ranks.tobytes(), totals.tobytes())

    def arrays(self) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """``ranks`` and ``totals``."""
        return np.frombuffer(self.ranks, dtype=np.int32), np.frombuffer(self.totals, dtype=np.float32)


class PackedResult(NamedTuple):
    """A :class:`~flashrec.request.Result` whose beams are found again in the front's copy of the catalog."""

    beams: FoundSids | tuple[Any, ...]
    prompt_tokens: int
    cached_tokens: int
    score_space: ScoreSpace
    catalog: str | None


class Answer(NamedTuple):
    """Engine: how a request ended."""

    rid: str
    outcome: PackedResult | Exception


class Reply(NamedTuple):
    """Engine: how a :class:`Call` ended."""

    number: int
    value: Any = None
    error: Exception | None = None


class Drain(NamedTuple):
    """Engine: take no new request, finish those in hand and end; ``at_once``: do not even finish them."""

    at_once: bool = False


class InternalError(Exception):
    """Something unexpected went wrong in the engine's process with one request or call; its log says what."""


def pack(result: Result) -> PackedResult:
    """A result without what the front has as well."""
    beams: FoundSids | tuple[Any, ...]
    if isinstance(result.beams, LazyBeams):
        beams = FoundSids.of(*result.beams.found())
    else:
        beams = tuple(result.beams)
    return PackedResult(beams, result.prompt_tokens, result.cached_tokens, result.score_space, result.catalog)


def sendable(error: BaseException) -> Exception:
    """The error as another process can read it: FlashRec's own as they are, others by what they say.

    Those are no :class:`EngineFault`: one request's misfortune must not end a front.
    """
    return error if isinstance(error, FlashRecError) else InternalError(f"{type(error).__name__}: {error}")
