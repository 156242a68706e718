"""What the server needs of the scheduler and the engine: the real ones, or a test's."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

from flashrec.config import EngineConfig
from flashrec.profiler import ProfileOptions, Profiler
from flashrec.request import Request, Result
from flashrec.sid.catalog import Catalog
from flashrec.sid.layout import SidLayout


class Engine(Protocol):
    """The engine as the server reads it; nothing here runs on the engine's thread."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def layout(self) -> SidLayout | None: ...
    @property
    def catalog(self) -> Catalog | None: ...
    @property
    def tokenizer(self) -> Any: ...

    @property
    def profiler(self) -> Profiler: ...

    def prepare(self, request: Request) -> object:
        """Validate without queueing. Raises :class:`~flashrec.errors.RequestError`."""
        ...

    def stats(self) -> dict[str, Any]:
        """Counters and choices, as JSON values."""
        ...


class Scheduler(Protocol):
    """See :class:`flashrec.runtime.scheduler.Scheduler`."""

    @property
    def engine(self) -> Engine: ...
    @property
    def queue_depth(self) -> int: ...

    def submit(self, request: Request, deadline: float | None = None) -> Future[Result]:
        """Queue a request; ``deadline`` is on :func:`time.monotonic`'s clock. Raises if it is invalid."""
        ...

    def cancel(self, rid: str) -> None: ...
    def drain(self, timeout: float) -> bool: ...
    def close(self) -> None: ...
    def flush_cache(self) -> int:
        """Forget cached prefixes; returns the pages freed."""
        ...

    def start_profile(self, options: ProfileOptions) -> None: ...
    def stop_profile(self) -> None: ...
