"""A request between its submission and its answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from flashrec.errors import DeadlineError, RequestError
from flashrec.request import Request, Result
from flashrec.runtime.flight import Outcome
from flashrec.runtime.member import Member


@dataclass(slots=True, eq=False)
class Ticket:
    """A request in the scheduler's hands. ``deadline`` is on :func:`time.monotonic`'s clock."""

    member: Member
    future: Future[Result]
    deadline: float | None
    answered: bool = False

    def answer(self, outcome: Outcome, now: float) -> None:
        """Say how its wave went, or that it was too late."""
        if not isinstance(outcome, Result):
            self.fail(outcome)
        elif self.deadline is not None and self.deadline <= now:
            self.fail(DeadlineError("the deadline passed while the request ran"))
        elif self._is_awaited():
            self.future.set_result(outcome)

    def fail(self, error: Exception) -> None:
        """Answer whoever still waits for it."""
        if self._is_awaited():
            self.future.set_exception(error)

    def _is_awaited(self) -> bool:
        """Whether its one answer is wanted, which is given now."""
        if self.answered:
            return False
        self.answered = True
        return self.future.set_running_or_notify_cancel()


def members_of(requests: Sequence[Request], prepare: Callable[[Request], Member]) -> Iterator[Member]:
    """All of a list, by ``prepare``. Raises its :class:`RequestError`; of several, the field names the place in the
    list."""
    for index, request in enumerate(requests):
        try:
            yield prepare(request)
        except RequestError as error:
            if len(requests) == 1:
                raise
            raise RequestError(f"{error.field}[{index}]", error.message) from None
