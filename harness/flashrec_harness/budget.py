"""Time budgets: a suite that runs out of its minutes is stopped, children and all, and ends inconclusive."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

_deadline: list[float] = []


class BudgetSpent(BaseException):
    """The time budget is over. Not an ``Exception``: no handler on the way up may take it for a failed request."""


def seconds_left() -> float | None:
    """Seconds until the budget ends, never negative; ``None`` without one."""
    return max(_deadline[0] - time.monotonic(), 0.0) if _deadline else None


def check() -> None:
    """Raise :class:`BudgetSpent` if the budget is over."""
    if seconds_left() == 0:
        raise BudgetSpent


def release() -> None:
    """What follows takes the time that it needs: a verdict about what has been measured, the end of a server."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    _deadline.clear()


@contextmanager
def within(minutes: float | None) -> Iterator[None]:
    """Give the block a budget: it is interrupted by :class:`BudgetSpent` when the minutes are over.

    Child processes get what is left as their time-out, so that threads that wait for one end too. Main thread only,
    and one budget at a time: the interruption is an alarm signal.
    """
    if minutes is None:
        yield
        return

    def ring(number: int, frame: object) -> None:
        raise BudgetSpent

    before = signal.signal(signal.SIGALRM, ring)
    _deadline.append(time.monotonic() + minutes * 60)
    signal.setitimer(signal.ITIMER_REAL, minutes * 60)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        _deadline.clear()
