"""Interval arithmetic over events: unions, overlaps and gaps, in microseconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from flashrec_harness.tracing.reader import Event

Interval = tuple[float, float]


def interval(event: Event) -> Interval:
    """``(start, end)`` of an event."""
    return float(event["ts"]), float(event["ts"] + event["dur"])


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals, in order, that cover the same points."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Total length of the union."""
    return sum(end - start for start, end in union(intervals))


def clip(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """The parts that lie inside ``window``."""
    low, high = window
    return [(max(s, low), min(e, high)) for s, e in intervals if e > low and s < high]


def gaps(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """What of ``window`` no interval covers."""
    free, at = [], window[0]
    for start, end in union(clip(intervals, window)):
        if start > at:
            free.append((at, start))
        at = max(at, end)
    if at < window[1]:
        free.append((at, window[1]))
    return free


def holders(events: Iterable[Event], windows: Sequence[Interval]) -> list[Event | None]:
    """For each window the innermost event that covers most of it: the frame or span that explains it.

    ``events`` are of one thread, where they nest.
    """
    found: list[Event | None] = [None] * len(windows)
    upcoming = deque(sorted(events, key=lambda event: (event["ts"], -event["dur"])))
    nest: list[Event] = []
    for index in sorted(range(len(windows)), key=lambda index: sum(windows[index])):
        low, high = windows[index]
        middle = (low + high) / 2
        while upcoming and upcoming[0]["ts"] <= middle:
            event = upcoming.popleft()
            _leave(nest, event["ts"])
            nest.append(event)
        _leave(nest, middle)
        found[index] = next((event for event in reversed(nest) if _covers_most(event, low, high)), None)
    return found


def _leave(nest: list[Event], now: float) -> None:
    while nest and interval(nest[-1])[1] <= now:
        nest.pop()


def _covers_most(event: Event, low: float, high: float) -> bool:
    start, end = interval(event)
    return min(end, high) - max(start, low) > 0.5 * (high - low)


def inside(events: Iterable[Event], windows: Sequence[Interval]) -> list[Event]:
    """Events that start inside one of ``windows`` (disjoint, in order)."""
    return [event for event in events if any(start <= event["ts"] < end for start, end in windows)]
