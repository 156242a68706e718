"""Rules that every whole GPU trace keeps; where one is broken, its metrics are invalid."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from flashrec_harness.tracing.kernels import GRAPH_LAUNCH
from flashrec_harness.tracing.reader import Event, RawTrace

_NODE = "graph node id"
_MANY = 3
"""Replays that launched the same show what a graph launches."""

Shape = tuple[tuple[str, str, str], ...]
"""Name, grid and block of a replay's launches, in order."""


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
    nodes: defaultdict[object, list[int]] = defaultdict(list)
    shapes: Counter[Shape] = Counter()
    for kernels in replays.values():
        kernels.sort(key=lambda kernel: kernel["ts"])
        node = kernels[0]["args"].get(_NODE)
        if node is None:
            shapes[_shape(kernels)] += 1
        else:
            nodes[node].append(len(kernels))
    uneven = [
        f"replays of graph node {n} have {sorted(set(sizes))} kernels" for n, sizes in nodes.items() if _mixed(sizes)
    ]
    return [f"{found}: events were lost" for found in [*uneven, *_fallen_short(shapes)][:1]]


def _mixed(sizes: Sequence[int]) -> bool:
    return len(set(sizes)) > 1


def _shape(kernels: Sequence[Event]) -> Shape:
    """What a replay without node ids launched: torch 2.11 writes none (H200, 2026-11-29)."""
    return tuple((one["name"], str(one["args"].get("grid")), str(one["args"].get("block"))) for one in kernels)


def _fallen_short(shapes: Counter[Shape]) -> list[str]:
    """Replays that launched what several others did, in the same grids, but for some kernels.

    Two graphs may open alike and differ in length, as those of two row buckets do; their grids then differ too.
    """
    usual = [shape for shape, times in shapes.items() if times >= _MANY]
    return [
        f"a replay of the graph that opens with {whole[0][0][:60]} has {len(shape)} of its {len(whole)} kernels"
        for whole in usual
        for shape in shapes
        if len(shape) < len(whole) and _is_part(shape, whole)
    ]


def _is_part(shape: Shape, whole: Shape) -> bool:
    """Whether ``shape`` is ``whole`` with launches left out."""
    rest = iter(whole)
    return all(launch in rest for launch in shape)
