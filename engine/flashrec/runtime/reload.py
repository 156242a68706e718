"""Changing an engine's catalogs while it serves: read beside the waves, captured between them, switched at once."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from flashrec.errors import CaptureError, CatalogError, CatalogStateError
from flashrec.request import ScoreSpace
from flashrec.runtime.catalogs import Catalogs, Place, ServedCatalog
from flashrec.runtime.member import WaveKey
from flashrec.runtime.stage import DecodeStage

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Turn(Protocol):
    """Runs a function on the thread that runs waves, while none runs, and hands back its result or its error."""

    def __call__(self, function: Callable[[], T]) -> T: ...


def at_once(function: Callable[[], T]) -> T:
    """The turn of a caller that runs the waves itself."""
    return function()


class Reload:
    """Loads, rolls back and drops the catalogs of one engine, one change at a time.

    A change that fails leaves everything as it was. Waves go on while a catalog is read, and take turns with the
    captures of its graphs, so that none waits for more than one of them.
    """

    def __init__(self, catalogs: Catalogs, stage: DecodeStage, space: ScoreSpace) -> None:
        self.catalogs = catalogs
        self.stage = stage
        self.space = space
        self._changing = threading.Lock()

    def load(self, name: str, path: Path, *, activate: bool, turn: Turn) -> Place:
        """Read a catalog and put it into service under ``name``, or on standby. See :meth:`Catalogs.read`.

        Raises:
            CatalogStateError: another one is being loaded.
            CatalogError: it is malformed or does not fit.
        """
        if not self._changing.acquire(blocking=False):
            raise CatalogStateError("another catalog is being loaded: wait for it")
        try:
            turn(self.tidy)  # what was held until after the last wave makes room for the new one
            served = self.catalogs.read(name, path)
            self.capture(served, like=self._in_service(name), turn=turn)
            self.catalogs.on_read(served)
            place = turn(functools.partial(self.catalogs.place, served, activate=activate))
            turn(self.tidy)
        except CaptureError as error:
            raise CatalogError(f"{path}: {error}") from error
        finally:
            self._changing.release()
        logger.info("catalog %s: %s, %d semantic IDs, hash %s", *_told(served))
        return place

    def _in_service(self, name: str) -> int | None:
        place = self.catalogs.places().get(name)
        return None if place is None else place.active.revision

    def rollback(self, name: str, *, turn: Turn) -> Place:
        """See :meth:`Catalogs.rollback`."""
        place = turn(functools.partial(self.catalogs.rollback, name))
        logger.info("catalog %s: back to %s, %d semantic IDs, hash %s", name, *_told(place.active)[1:])
        return place

    def drop(self, name: str, *, turn: Turn) -> None:
        """See :meth:`Catalogs.drop`."""
        turn(functools.partial(self.catalogs.drop, name))
        turn(self.tidy)

    def capture(self, served: ServedCatalog, *, like: int | None = None, turn: Turn = at_once) -> None:
        """Capture what its waves will run, a program a turn: what revision ``like`` has, where that is given."""
        key = WaveKey(True, self.space, len(served.tries), served.revision)
        for place in turn(functools.partial(self.stage.missing, key, like=like)):
            turn(functools.partial(self.stage.capture, place))

    def tidy(self) -> None:
        """On the thread of the waves: give up what the device keeps for revisions that nobody holds any more."""
        self.stage.forget(self.catalogs.gone())


def _told(served: ServedCatalog) -> tuple[str, Path, int, str]:
    return served.label, served.catalog.path, served.catalog.num_sids, served.catalog.digest
