"""Interval arithmetic over events: unions, overlaps and gaps, in microseconds."""

from __future__ import annotations

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


def innermost(events: Sequence[Event], window: Interval) -> Event | None:
    """The shortest event that covers most of ``window``: the frame or span that explains it."""
    best: tuple[float, Event] | None = None
    for event in events:
        start, end = interval(event)
        overlap = min(end, window[1]) - max(start, window[0])
        if overlap > 0.5 * (window[1] - window[0]) and (best is None or event["dur"] < best[0]):
            best = (event["dur"], event)
    return None if best is None else best[1]


def inside(events: Iterable[Event], windows: Sequence[Interval]) -> list[Event]:
    """Events that start inside one of ``windows`` (disjoint, in order)."""
    return [event for event in events if any(start <= event["ts"] < end for start, end in windows)]
