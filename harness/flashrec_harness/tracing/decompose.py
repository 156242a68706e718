"""A trace taken apart for people: the tree of spans, its waves, who holds the gaps, classes of kernels, cadence."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from flashrec_harness.tracing import analysis
from flashrec_harness.tracing import intervals as iv
from flashrec_harness.tracing.analysis import DECODE, FINALIZE, PREFILL
from flashrec_harness.tracing.kernels import GRAPH_LAUNCH, classify, is_eager_launch, is_stall
from flashrec_harness.tracing.reader import Event, RawTrace

Row = dict[str, object]
_SHOWN_WAVES = 12


@dataclass(slots=True)
class Branch:
    """All spans of one name under one parent; times in milliseconds. ``own_ms`` is what no child covers."""

    name: str
    count: int = 0
    total_ms: float = 0.0
    own_ms: float = 0.0
    children: dict[str, Branch] = field(default_factory=dict)


def span_tree(trace: RawTrace) -> Branch:
    """The spans nested as they were: a span is the child of the innermost one on its thread that covers it."""
    root = Branch("")
    by_thread: defaultdict[object, list[Event]] = defaultdict(list)
    for span in analysis.flashrec_spans(trace):
        by_thread[span["tid"]].append(span)
    for spans in by_thread.values():
        stack: list[tuple[float, Branch]] = []
        for span in sorted(spans, key=lambda one: (one["ts"], -one["dur"])):
            start, end = iv.interval(span)
            while stack and start >= stack[-1][0]:
                stack.pop()
            parent = stack[-1][1] if stack else root
            branch = parent.children.setdefault(span["name"], Branch(span["name"]))
            branch.count += 1
            branch.total_ms += span["dur"] / 1e3
            branch.own_ms += span["dur"] / 1e3
            parent.own_ms -= span["dur"] / 1e3
            stack.append((end, branch))
    return root


def tree_rows(trace: RawTrace) -> list[Row]:
    """The tree in rows, children under their parent and indented, the longest first."""
    rows: list[Row] = []

    def visit(branch: Branch, depth: int) -> None:
        for child in sorted(branch.children.values(), key=lambda one: -one.total_ms):
            share = child.total_ms / branch.total_ms if depth else None
            rows.append(
                {
                    "span": "\u2003" * depth + child.name,
                    "count": child.count,
                    "total ms": child.total_ms,
                    "own ms": child.own_ms,
                    "of its parent": "" if share is None else f"{share:.0%}",
                }
            )
            visit(child, depth + 1)

    visit(span_tree(trace), 0)
    return rows


def wave_rows(trace: RawTrace, count: int = _SHOWN_WAVES) -> list[Row]:
    """The first waves, each with its length, how busy the device was and what the host did in it."""
    work = analysis.busy(trace)
    spans = {name: analysis.windows(trace, name) for name in (PREFILL, DECODE, FINALIZE)}
    rows: list[Row] = []
    for number, wave in enumerate(analysis.waves(trace)[:count]):
        calls = [call["name"] for call in iv.inside(trace.runtime, [wave])]
        free = iv.gaps(work, wave)
        rows.append(
            {
                "wave": number + 1,
                "ms": (wave[1] - wave[0]) / 1e3,
                "busy": f"{iv.length(iv.clip(work, wave)) / (wave[1] - wave[0]):.0%}",
                **{
                    f"{name.removeprefix(analysis.PREFIX)} ms": iv.length(iv.clip(windows, wave)) / 1e3
                    for name, windows in spans.items()
                },
                "longest gap us": max((end - start for start, end in free), default=0.0),
                "graphs": calls.count(GRAPH_LAUNCH),
                "eager launches": sum(map(is_eager_launch, calls)),
                "stalls": sum(map(is_stall, calls)),
            }
        )
    return rows


def gap_rows(trace: RawTrace, over: Sequence[iv.Interval]) -> list[Row]:
    """All idle time inside ``over`` by who holds it, the most first."""
    held: defaultdict[str, list[float]] = defaultdict(list)
    for gap in analysis.largest_gaps(trace, over, count=2000):
        held[gap.holder].append(gap.length_us)
    total = sum(map(sum, held.values()))
    rows = sorted(held.items(), key=lambda pair: -sum(pair[1]))[:12]
    return [
        {
            "held by": holder,
            "gaps": len(lengths),
            "total ms": sum(lengths) / 1e3,
            "of all gaps": f"{sum(lengths) / total:.0%}",
            "longest us": max(lengths),
        }
        for holder, lengths in rows
    ]


def class_rows(trace: RawTrace) -> list[Row]:
    """Kernels by class: how many, how long together, and the share of all kernel time; empty without a GPU."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    for kernel in trace.device:
        times[str(classify(kernel["name"]))].append(kernel["dur"] / 1e3)
    total = sum(map(sum, times.values()))
    return [
        {"class": kind, "kernels": len(found), "total ms": sum(found), "of kernel time": f"{sum(found) / total:.0%}"}
        for kind, found in sorted(times.items(), key=lambda pair: -sum(pair[1]))
    ]


def cadence_rows(trace: RawTrace) -> list[Row]:
    """The steps inside waves, from one embedding kernel to the next; empty where there are none."""
    steps = sorted(analysis.cadence_ms(trace, analysis.waves(trace)))
    if not steps:
        return []
    return [
        {
            "steps": len(steps),
            "median ms": statistics.median(steps),
            "shortest ms": steps[0],
            "longest ms": steps[-1],
        }
    ]
