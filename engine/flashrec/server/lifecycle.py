"""Whether the server takes requests, and what ends it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, MutableSequence

from flashrec.server.errors import ApiError

logger = logging.getLogger(__name__)


class Places:
    """Requests held at once, counted per process: ``counts`` are shared by all, this one writes its ``own`` only."""

    def __init__(self, counts: MutableSequence[int] | None = None, own: int = 0) -> None:
        self._counts = [0] if counts is None else counts
        self._own = own
        self.threads = 0
        """Requests of this process that a thread works for; see :meth:`hand_over`."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when this process holds one more or one less, or a thread has done its work."""

    @property
    def taken(self) -> int:
        """The requests that all processes hold."""
        return sum(self._counts)

    @property
    def held(self) -> int:
        """The requests that this process holds."""
        return self._counts[self._own]

    def take(self) -> None:
        self._counts[self._own] += 1
        self.on_change()

    def give(self) -> None:
        self._counts[self._own] -= 1
        self.on_change()

    @contextlib.contextmanager
    def hand_over(self) -> Iterator[None]:
        """A thread works for a request meanwhile, and wants the interpreter's lock."""
        self.threads += 1
        try:
            yield
        finally:
            self.threads -= 1
            self.on_change()


class Lifecycle:
    """Shared by the routes, which read it, and by the process, which acts on it. Event-loop thread only."""

    def __init__(self, places: Places | None = None) -> None:
        self.draining = False
        self.fault: BaseException | None = None
        self.places = places or Places()
        self.on_fault: Callable[[], None] = lambda: None

    def check_ready(self, retry_after_s: int) -> None:
        """Raises :class:`ApiError` 503 while no new request is taken."""
        if self.fault is not None:
            raise ApiError(503, "engine_fault", f"the engine failed: {self.fault}")
        if self.draining:
            raise self.refusal(retry_after_s)

    def refusal(self, retry_after_s: int) -> ApiError:
        """503: this server will not answer, another may."""
        return ApiError(503, "shutting_down", "the server is shutting down", retry_after_s=retry_after_s)

    def report_fault(self, error: BaseException) -> None:
        """The engine is lost: refuse what comes, and let the process end with an error.

        A scheduler that is shut down on purpose answers the same; that is no fault.
        """
        if self.fault is None and not self.draining:
            self.fault = error
            logger.critical("engine fault, shutting down: %s", error)
            self.on_fault()
