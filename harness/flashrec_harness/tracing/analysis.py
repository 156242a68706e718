"""What a trace shows: spans, cadence, gaps and who holds them, graph and eager launches, stalls, GEMMs."""

from __future__ import annotations

import itertools
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flashrec_harness.tracing import intervals as iv
from flashrec_harness.tracing.intervals import Interval
from flashrec_harness.tracing.kernels import (
    GEMMS,
    GRAPH_LAUNCH,
    KernelClass,
    classify,
    is_eager_launch,
    is_stall,
)
from flashrec_harness.tracing.reader import Event, RawTrace

PREFIX = "flashrec."
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
MIN_LEAD = 0.1
"""Share of a step's kernel time that is still to run when a host that keeps up has launched everything."""
PREFILL, DECODE, FINALIZE = "flashrec.prefill", "flashrec.decode", "flashrec.finalize"


@dataclass(frozen=True, slots=True)
class SpanRow:
    """All spans of one name; times in milliseconds."""

    name: str
    count: int
    total_ms: float
    median_ms: float
    longest_ms: float


@dataclass(frozen=True, slots=True)
class Gap:
    """A stretch in which the device (or, on a CPU, the engine thread) did nothing; in microseconds.

    ``holder`` is the innermost span or Python frame that covers it.
    """

    start_us: float
    length_us: float
    holder: str


def flashrec_spans(trace: RawTrace) -> list[Event]:
    """Spans of the engine and its server, in order of start."""
    return [event for event in trace.spans if event["name"].startswith(PREFIX)]


def span_table(trace: RawTrace) -> list[SpanRow]:
    """One row per span name, longest total first."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for event in flashrec_spans(trace):
        by_name[event["name"]].append(event["dur"] / 1e3)
    rows = [
        SpanRow(name, len(times), sum(times), statistics.median(times), max(times)) for name, times in by_name.items()
    ]
    return sorted(rows, key=lambda row: -row.total_ms)


def windows(trace: RawTrace, name: str, *, drop_first: int = 0) -> list[Interval]:
    """Intervals of the spans called ``name`` without the first ``drop_first``, if more remain."""
    found = [iv.interval(event) for event in flashrec_spans(trace) if event["name"] == name]
    return found[drop_first:] if len(found) > drop_first else found


def busy(trace: RawTrace) -> list[Interval]:
    """When the device worked: kernels, copies and memsets; without a GPU, the engine thread's operators."""
    if trace.has_device:
        return iv.union(iv.interval(event) for event in trace.device)
    thread = engine_thread(trace)
    return iv.union(iv.interval(event) for event in trace.cpu_ops if event["tid"] == thread)


def engine_thread(trace: RawTrace) -> object:
    """The host thread that holds the decode spans (else the one with most operators)."""
    decode = [event["tid"] for event in trace.spans if event["name"] == DECODE]
    if decode:
        return Counter(decode).most_common(1)[0][0]
    counts = Counter(event["tid"] for event in trace.cpu_ops)
    return counts.most_common(1)[0][0] if counts else None


def waves(trace: RawTrace) -> list[Interval]:
    """From the start of each prefill span to the end of the last decode or finalize span before the next."""
    starts = [start for start, _ in windows(trace, PREFILL)]
    ends = [end for name in (DECODE, FINALIZE) for _, end in windows(trace, name)]
    found = []
    for index, start in enumerate(starts):
        until = starts[index + 1] if index + 1 < len(starts) else float("inf")
        mine = [end for end in ends if start < end <= until]
        if mine:
            found.append((start, max(mine)))
    return found


def duty_cycle(trace: RawTrace, over: Sequence[Interval]) -> float:
    """Share of the intervals ``over`` in which the device worked."""
    total = iv.length(over)
    work = busy(trace)
    return sum(iv.length(iv.clip(work, window)) for window in iv.union(over)) / total if total else 0.0


def largest_gaps(trace: RawTrace, over: Sequence[Interval], count: int = 10) -> list[Gap]:
    """The longest idle stretches inside ``over``, each with the span and frame that hold it."""
    work = busy(trace)
    free = sorted((gap for window in iv.union(over) for gap in iv.gaps(work, window)), key=lambda gap: gap[0] - gap[1])
    thread = engine_thread(trace)
    longest = free[:count]
    spans = iv.holders([event for event in flashrec_spans(trace) if event["tid"] == thread], longest)
    frames = iv.holders([event for event in trace.python if event["tid"] == thread], longest)
    return [
        Gap(start, end - start, _holder(span, frame))
        for (start, end), span, frame in zip(longest, spans, frames, strict=True)
    ]


def _holder(*events: Event | None) -> str:
    return _ADDRESS.sub("", " / ".join(event["name"] for event in events if event)) or "outside every span"


@dataclass(frozen=True, slots=True)
class LaunchSummary:
    """How kernels inside the windows were launched; kernel times in milliseconds."""

    graph_launches: int
    eager_launches: dict[str, int]
    graphed_ms: float
    eager_ms: float

    @property
    def graphed_share(self) -> float:
        """Share of kernel time that came from graphs."""
        total = self.graphed_ms + self.eager_ms
        return self.graphed_ms / total if total else 0.0


def launches(trace: RawTrace, over: Sequence[Interval], allowed: re.Pattern[str]) -> LaunchSummary:
    """Graph and eager launches whose host call starts inside ``over``.

    ``allowed`` names kernels that may be launched eagerly; they count in the times, not as offences.
    """
    kernels: dict[int, list[Event]] = defaultdict(list)
    for event in trace.device:
        kernels[event["args"].get("correlation", -1)].append(event)
    graphs, eager = 0, Counter[str]()
    graphed_us = eager_us = 0.0
    for call in iv.inside(trace.runtime, over):
        mine = kernels.get(call["args"].get("correlation", -2), [])
        if call["name"] == GRAPH_LAUNCH:
            graphs += 1
            graphed_us += sum(kernel["dur"] for kernel in mine)
        elif is_eager_launch(call["name"]):
            eager_us += sum(kernel["dur"] for kernel in mine)
            eager.update(kernel["name"] for kernel in mine if not allowed.search(kernel["name"]))
    return LaunchSummary(graphs, dict(eager.most_common()), graphed_us / 1e3, eager_us / 1e3)


def stalls(trace: RawTrace, over: Sequence[Interval]) -> dict[str, int]:
    """Calls inside ``over`` that allocate, free or wait, by name."""
    found = Counter(call["name"] for call in iv.inside(trace.runtime, over) if is_stall(call["name"]))
    return dict(found.most_common())


def gpu_bound_share(trace: RawTrace, steps: Sequence[Interval]) -> float:
    """Share of ``steps`` (host spans) in which the host runs ahead of the device.

    Every kernel ends after its own launch, so that alone says nothing: a step is GPU-bound if at least
    ``MIN_LEAD`` of its kernel time is still to run when its last launch returns.
    """
    by_correlation = defaultdict(list)
    for kernel in trace.device:
        by_correlation[kernel["args"].get("correlation", -1)].append(kernel)
    bound = counted = 0
    for step in steps:
        calls = [c for c in iv.inside(trace.runtime, [step]) if c["name"] == GRAPH_LAUNCH or is_eager_launch(c["name"])]
        kernels = [k for c in calls for k in by_correlation.get(c["args"].get("correlation", -2), [])]
        if not kernels:
            continue
        work = [iv.interval(kernel) for kernel in kernels]
        launched = max(call["ts"] + call["dur"] for call in calls)
        left = iv.length(iv.clip(work, (launched, float("inf"))))
        counted += 1
        bound += left >= MIN_LEAD * iv.length(work)
    return bound / counted if counted else 0.0


@dataclass(frozen=True, slots=True)
class GemmSummary:
    """GEMM kernels by class, and the names of those that are bf16."""

    counts: dict[KernelClass, int]
    times_ms: dict[KernelClass, float]
    bf16_names: dict[str, int]


def gemms(kernels: Iterable[Event]) -> GemmSummary:
    """Count and time the GEMMs among device events."""
    counts: Counter[KernelClass] = Counter()
    times: defaultdict[KernelClass, float] = defaultdict(float)
    names: Counter[str] = Counter()
    for kernel in kernels:
        kind = classify(kernel["name"])
        if kind in GEMMS:
            counts[kind] += 1
            times[kind] += kernel["dur"] / 1e3
        if kind is KernelClass.BF16_GEMM:
            names[kernel["name"]] += 1
    return GemmSummary(dict(counts), dict(times), dict(names.most_common()))


def cadence_ms(trace: RawTrace, over: Sequence[Interval]) -> list[float]:
    """Milliseconds between starts of successive embedding kernels: a step's length inside a wave's graph."""
    starts = [event["ts"] for event in trace.device if classify(event["name"]) is KernelClass.EMBEDDING]
    found = []
    for low, high in over:
        mine = [start for start in starts if low <= start < high]
        found += [(after - before) / 1e3 for before, after in itertools.pairwise(mine)]
    return found


def top_kernels(trace: RawTrace, count: int = 15) -> list[dict[str, object]]:
    """Rows of the kernels (on a CPU: operators of the engine thread) with most total time."""
    thread = engine_thread(trace)
    events = trace.device or [event for event in trace.cpu_ops if event["tid"] == thread]
    totals: defaultdict[str, list[float]] = defaultdict(list)
    for event in events:
        totals[event["name"]].append(event["dur"] / 1e3)
    rows = sorted(totals.items(), key=lambda pair: -sum(pair[1]))[:count]
    return [
        {
            "name": name,
            "class": str(classify(name)) if trace.has_device else "operator",
            "count": len(times),
            "total ms": sum(times),
            "median ms": statistics.median(times),
        }
        for name, times in rows
    ]
