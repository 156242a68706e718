"""A trace for people: tables in the terminal, and a self-contained HTML picture of spans and device work."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from rich.console import Console
from rich.text import Text

from flashrec_harness.outcome import Check, exit_code, worst
from flashrec_harness.report.html import format_cell, render_page, slug
from flashrec_harness.report.terminal import rows_table
from flashrec_harness.tracing import analysis, decompose
from flashrec_harness.tracing import intervals as iv
from flashrec_harness.tracing.checks import Expectation, judge_file
from flashrec_harness.tracing.decompose import Row
from flashrec_harness.tracing.kernels import KernelClass, classify
from flashrec_harness.tracing.reader import Event, RawTrace, read_trace

_WIDTH, _LANE, _GUTTER = 1000, 22, 150
_MAX_BOXES = 4000
_PICTURED_WAVES = 6
_COLOURS: dict[KernelClass, int] = {
    kind: place for place, kind in enumerate(kind for kind in KernelClass if kind is not KernelClass.COPY)
}
"""The page's series colour of each kernel class."""
_STYLE = """<style>
.timeline svg text { font-size: 11px; fill: var(--ink); } .timeline svg { min-width: 760px; }
.timeline .key span { margin-right: 1.2em; }
.timeline .lane { fill: var(--code); } .timeline .box { stroke: var(--card); stroke-width: .6; }
.timeline .idle { fill: var(--fail); opacity: .35; } .timeline { overflow-x: auto; }
</style>"""


def show_file(path: Path, html: Path | None, console: Console, expected: Expectation) -> int:
    """Print a trace's checks and tables, write its picture; returns the exit code."""
    checks = judge_file(path, expected)
    for check in checks:
        console.print(Text(f"{check.outcome:<12}", style="bold"), Text(f"{check.name}: "), end="")
        console.print(Text(". ".join(filter(None, [check.reason, check.summary]))))
    if len(checks) > 1:
        trace = read_trace(path)
        for title, rows in _tables(trace):
            if rows:
                console.print(rows_table(title, rows))
        target = html or path.with_name(path.name.split(".")[0] + ".html")
        console.print(f"picture: {write_picture(path, target, checks)}", markup=False, soft_wrap=True)
    return exit_code(checks)


def write_picture(path: Path, target: Path, checks: Sequence[Check] = ()) -> Path:
    """Write the picture of the trace at ``path`` to ``target`` and return it."""
    trace = read_trace(path)
    low, high = trace.window_us
    tone = slug(worst(check.outcome for check in checks))
    body = [
        f'<header class="card verdict tone-{tone}"><div class="kicker">FlashRec trace</div>'
        f"<h1>{escape(path.name)}</h1><div class='facts'><span>{(high - low) / 1e3:.1f} ms recorded</span>"
        f"<span>{len(analysis.waves(trace))} waves</span>"
        f"<span>{escape(', '.join(trace.device_names) or 'no GPU in this trace')}</span>"
        "<span>times are under the profiler: read ratios, not speed</span></div></header>",
        _verdicts(checks),
    ]
    for title, window in _pictured(trace):
        body += [f"<h2>{title}</h2>", f'<div class="card timeline">{_timeline(trace, window)}{_legend(trace)}</div>']
    body += [f"<h2>{escape(title)}</h2>{_table(rows)}" for title, rows in _tables(trace) if rows]
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(render_page(f"trace {path.name}", "\n".join(body), head=_STYLE), encoding="utf-8")
    return target


def _tables(trace: RawTrace) -> list[tuple[str, list[Row]]]:
    waves = analysis.waves(trace)
    gaps = analysis.largest_gaps(trace, waves)
    return [
        ("Spans, as they nest", decompose.tree_rows(trace)),
        ("Waves", decompose.wave_rows(trace)),
        ("Step cadence, from embedding to embedding", decompose.cadence_rows(trace)),
        ("Gaps inside waves, by who holds them", decompose.gap_rows(trace, waves)),
        ("Longest gaps inside waves", [{"gap us": gap.length_us, "held by": gap.holder} for gap in gaps]),
        ("Kernels by class", decompose.class_rows(trace)),
        ("Kernels" if trace.has_device else "Operators of the engine thread", analysis.top_kernels(trace)),
    ]


def _verdicts(checks: Sequence[Check]) -> str:
    rows = "".join(
        f'<div class="check static"><div><span class="pill tone-{slug(check.outcome)}">{check.outcome}</span>'
        f'<span class="name">{escape(check.name)}</span><span class="seen">'
        f"{escape('. '.join(filter(None, [check.reason, check.summary])))}</span></div></div>"
        for check in checks
    )
    return f'<section class="card list">{rows}</section>' if rows else ""


def _number_class(value: object) -> str:
    return ' class="num"' if isinstance(value, (int, float)) else ""


def _table(rows: list[Row]) -> str:
    head = "".join(f"<th{_number_class(value)}>{escape(key)}</th>" for key, value in rows[0].items())
    lines = "".join(
        "<tr>"
        + "".join(f"<td{_number_class(value)}>{escape(format_cell(value))}</td>" for value in row.values())
        + "</tr>"
        for row in rows
    )
    return f'<div class="card list"><div class="scroll"><table><tr>{head}</tr>{lines}</table></div></div>'


def _pictured(trace: RawTrace) -> list[tuple[str, iv.Interval]]:
    """The first few waves, enough to see the pattern, and one of them, large enough to see its kernels."""
    found = analysis.waves(trace)[:_PICTURED_WAVES]
    if not found:
        return [("Timeline", trace.window_us)]
    several = (f"Timeline: the first {len(found)} waves", (found[0][0], found[-1][1]))
    return [several, ("Timeline: one wave", found[len(found) // 2])] if len(found) > 1 else [several]


def _timeline(trace: RawTrace, window: iv.Interval) -> str:
    spans = analysis.flashrec_spans(trace)
    lanes: list[tuple[str, list[Event]]] = [
        (name.removeprefix(analysis.PREFIX), [span for span in spans if span["name"] == name])
        for name in dict.fromkeys(span["name"] for span in spans)
    ]
    if trace.has_device:
        for stream in sorted({event["args"].get("stream", 0) for event in trace.device}):
            mine = [event for event in trace.device if event["args"].get("stream", 0) == stream]
            lanes.append((f"GPU stream {stream}", mine))
    else:
        thread = analysis.engine_thread(trace)
        lanes.append(("operators", [op for op in trace.cpu_ops if op["tid"] == thread]))
    height = _LANE * (len(lanes) + 2)
    scale = (_WIDTH - _GUTTER) / (window[1] - window[0])
    parts = [_lane(index, name, events, window, scale) for index, (name, events) in enumerate(lanes)]
    parts.append(_idle(trace, len(lanes), window, scale))
    label = f"{(window[1] - window[0]) / 1e3:.2f} ms"
    parts.append(f'<text x="{_GUTTER}" y="{height - 5}">{label}</text>')
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="timeline">{"".join(parts)}</svg>'


def _legend(trace: RawTrace) -> str:
    """The colours of the kernel classes that the trace holds."""
    present = {classify(kernel["name"]) for kernel in trace.device}
    names = [
        f'<span><i class="k{place}"></i>{escape(str(kind))}</span>'
        for kind, place in _COLOURS.items()
        if kind in present
    ]
    return f'<div class="key">{"".join(names)}</div>' if names else ""


def _colour(event: Event, lane: int) -> str:
    if event.get("cat") != "kernel":
        return f"box s{lane % 6} mark"
    place = _COLOURS.get(classify(event["name"]), _COLOURS[KernelClass.OTHER])
    return f"box s{place} mark"


def _box(css: str, part: iv.Interval, y: int, window: iv.Interval, scale: float, title: str) -> str:
    start, end = max(part[0], window[0]), min(part[1], window[1])
    return (
        f'<rect class="{css}" x="{_GUTTER + (start - window[0]) * scale:.2f}" y="{y}"'
        f' width="{max((end - start) * scale, 0.4):.2f}" height="{_LANE - 5}">'
        f"<title>{escape(title)} {part[1] - part[0]:.0f} us</title></rect>"
    )


def _lane(index: int, name: str, events: list[Event], window: iv.Interval, scale: float) -> str:
    y = index * _LANE + 2
    visible = [e for e in events if e["ts"] + e["dur"] > window[0] and e["ts"] < window[1]]
    longest = sorted(visible, key=lambda event: -event["dur"])[:_MAX_BOXES]
    boxes = "".join(_box(_colour(e, index), iv.interval(e), y, window, scale, e["name"]) for e in longest)
    lane = f'<rect class="lane" x="{_GUTTER}" y="{y}" width="{_WIDTH - _GUTTER}" height="{_LANE - 5}"/>'
    return f'<text x="0" y="{y + 13}">{escape(name)}</text>{lane}{boxes}'


def _idle(trace: RawTrace, index: int, window: iv.Interval, scale: float) -> str:
    y = index * _LANE + 2
    work = analysis.busy(trace)
    free = [gap for wave in analysis.waves(trace) for gap in iv.clip(iv.gaps(work, wave), window)]
    longest = sorted(free, key=lambda gap: gap[0] - gap[1])[:_MAX_BOXES]
    boxes = "".join(_box("idle", gap, y, window, scale, "idle") for gap in longest)
    return f'<text x="0" y="{y + 13}">gaps inside waves</text>{boxes}'
