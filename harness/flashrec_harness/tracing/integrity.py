"""Rules that every whole GPU trace keeps; where one is broken, its metrics are invalid."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from flashrec_harness.tracing.kernels import GRAPH_LAUNCH
from flashrec_harness.tracing.reader import Event, RawTrace

_NODE = "graph node id"
_OPENING = 3
_MANY = 3


def incoherences(trace: RawTrace) -> list[str]:
    """What is broken: a kernel that starts before its launch, replays of one graph with unequal kernel counts."""
    calls = {call["args"]["correlation"]: call for call in trace.runtime if "correlation" in call.get("args", {})}
    return [*_early_kernels(trace, calls), *_uneven_replays(trace, calls)]


def _early_kernels(trace: RawTrace, calls: dict[int, Event]) -> list[str]:
    early = [
        kernel["name"]
        for kernel in trace.device
        if (call := calls.get(kernel["args"].get("correlation", -1))) and kernel["ts"] < call["ts"]
    ]
    return [f"{len(early)} kernels start before their launch, first {early[0][:60]}"] if early else []


def _uneven_replays(trace: RawTrace, calls: dict[int, Event]) -> list[str]:
    replays: defaultdict[int, list[Event]] = defaultdict(list)
    for kernel in trace.device:
        call = calls.get(kernel["args"].get("correlation", -1))
        if call is not None and call["name"] == GRAPH_LAUNCH:
            replays[call["args"]["correlation"]].append(kernel)
    sizes: defaultdict[object, list[int]] = defaultdict(list)
    for kernels in replays.values():
        sizes[_graph_of(sorted(kernels, key=lambda kernel: kernel["ts"]))].append(len(kernels))
    for graph, counts in sizes.items():
        if _lost(graph, counts):
            return [f"replays of {_named(graph)} have {sorted(set(counts))} kernels: events were lost"]
    return []


def _graph_of(kernels: Sequence[Event]) -> object:
    """What tells a graph: the node id of its first kernel, or the launch shapes of its first three.

    torch 2.11 writes no node ids (H200, 2026-11-29).
    """
    node = kernels[0]["args"].get(_NODE)
    if node is not None:
        return node
    return tuple(
        (kernel["name"], str(kernel["args"].get("grid")), str(kernel["args"].get("block")))
        for kernel in kernels[:_OPENING]
    )


def _lost(graph: object, counts: Sequence[int]) -> bool:
    """By node id any difference is a loss. Two graphs may open alike: then only a replay that falls short of a
    count that at least three share is one."""
    if not isinstance(graph, tuple):
        return len(set(counts)) > 1
    usual, times = Counter(counts).most_common(1)[0]
    return times >= _MANY and min(counts) < usual


def _named(graph: object) -> str:
    return f"the graph that opens with {graph[0][0][:60]}" if isinstance(graph, tuple) else f"graph node {graph}"
