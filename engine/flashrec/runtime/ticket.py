"""A request between its submission and its answer."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from flashrec.request import Result
from flashrec.runtime.member import Member


@dataclass(slots=True, eq=False)
class Ticket:
    """A request in the scheduler's hands. ``deadline`` is on :func:`time.monotonic`'s clock."""

    member: Member
    future: Future[Result]
    deadline: float | None

    def fail(self, error: Exception) -> None:
        """Answer whoever still waits for it."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)
