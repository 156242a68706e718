"""What the server needs of the scheduler and the engine: those of this process, of another one, or a test's."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from flashrec.config import EngineConfig
from flashrec.profiler import ProfileOptions
from flashrec.request import Request, Result
from flashrec.runtime.catalogs import CatalogNames, Place
from flashrec.sid.catalog import Catalog
from flashrec.sid.layout import SidLayout


class ProfilerStatus(Protocol):
    """See :class:`flashrec.profiler.Profiler`."""

    def status(self) -> dict[str, object]: ...


class Engine(Protocol):
    """The engine as the server reads it; nothing here runs on the engine's thread.

    Methods may wait for another process: not on the event loop.
    """

    @property
    def config(self) -> EngineConfig: ...
    @property
    def layout(self) -> SidLayout | None: ...
    @property
    def catalog(self) -> Catalog | None: ...
    @property
    def catalogs(self) -> CatalogNames: ...
    @property
    def tokenizer(self) -> Any: ...

    @property
    def profiler(self) -> ProfilerStatus: ...

    def stats(self) -> dict[str, Any]:
        """Counters and choices, as JSON values."""
        ...


class Scheduler(Protocol):
    """See :class:`flashrec.runtime.scheduler.Scheduler`."""

    @property
    def engine(self) -> Engine: ...
    @property
    def queue_depth(self) -> int: ...
    @property
    def rows_in_flight(self) -> int: ...

    def submit_all(self, requests: Sequence[Request], deadline: float | None = None) -> list[Future[Result]]:
        """Queue all requests or none; ``deadline`` is on :func:`time.monotonic`'s clock.

        Raises, or gives to each future, what is wrong with one: of several, ``field[i]`` names it.
        """
        ...

    def cancel(self, rid: str) -> None: ...
    def drain(self, timeout: float) -> bool: ...
    def close(self) -> None: ...
    def flush_cache(self) -> int:
        """Forget cached prefixes; returns the pages freed."""
        ...

    def load_catalog(self, name: str, path: Path, *, activate: bool = True) -> Place: ...
    def rollback_catalog(self, name: str) -> Place: ...
    def drop_catalog(self, name: str) -> None: ...
    def start_profile(self, options: ProfileOptions) -> None: ...
    def stop_profile(self) -> None: ...
