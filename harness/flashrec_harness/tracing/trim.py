"""A trace cut to a few waves: small enough to keep as test data, and whole by every rule of the reader."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import orjson

from flashrec.errors import ConfigError
from flashrec_harness.tracing import analysis
from flashrec_harness.tracing import intervals as iv
from flashrec_harness.tracing.analysis import DECODE, FINALIZE, PREFILL
from flashrec_harness.tracing.reader import END_MARKER, Event, RawTrace, TraceError, read_trace

MAX_BYTES = 300_000
_SHORTEST_FRAME_US = 50.0
_KEPT_ARGUMENTS = frozenset({"correlation", "stream", "device", "graph node id", "grid", "block"})


def trim(source: Path, target: Path, waves: int, *, skip: int = 1) -> Path:
    """Write ``waves`` waves of ``source``, after the first ``skip``, to ``target`` as one gzip stream.

    A kernel stays with the call that launched it, so that every count is that of whole waves. Python frames and
    operators shorter than 50 us go, and so do the arguments that the analyser does not read.

    Raises:
        ConfigError: ``source`` is not whole or has too few waves, or what is left takes more than 300 KB.
    """
    try:
        trace = read_trace(source)
    except TraceError as error:
        raise ConfigError(f"--trim: {error}") from None
    kept = _kept_events(trace, waves, skip)
    end = max(event["ts"] + event["dur"] for event in kept)
    body = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": index, "name": name} for index, name in enumerate(trace.device_names)],
        "traceEvents": [
            *map(_slim, kept),
            {"ph": "i", "s": "g", "name": END_MARKER, "pid": "", "tid": "", "ts": end},
        ],
    }
    data = gzip.compress(orjson.dumps(body), compresslevel=9, mtime=0)
    if len(data) > MAX_BYTES:
        raise ConfigError(
            f"{target.name}: {len(data):,} bytes, {MAX_BYTES:,} are allowed; keep fewer than {waves} waves"
        )
    target.write_bytes(data)
    return target


def _kept_events(trace: RawTrace, waves: int, skip: int) -> list[Event]:
    spans = {name: analysis.windows(trace, name) for name in (PREFILL, DECODE, FINALIZE)}
    found = min(map(len, spans.values()))
    if waves < 1 or found < skip + waves:
        raise ConfigError(f"{trace.path.name}: {found} whole waves, {skip + waves} needed to keep {waves} after {skip}")
    chosen = {name: windows[skip : skip + waves] for name, windows in spans.items()}
    window = (chosen[PREFILL][0][0], chosen[FINALIZE][-1][1])
    ours = {(name, start) for name, windows in chosen.items() for start, _ in windows}
    others = iv.union(span for name, windows in spans.items() for span in windows if (name, span[0]) not in ours)
    runtime = [call for call in iv.inside(trace.runtime, [window]) if not iv.inside([call], others)]
    launched = {call["args"].get("correlation") for call in runtime}
    device = [event for event in trace.device if event["args"].get("correlation") in launched]
    annotations = [
        span
        for span in iv.inside(trace.spans, [window])
        if span["name"] not in spans or (span["name"], float(span["ts"])) in ours
    ]
    thread = analysis.engine_thread(trace)
    host = [
        event
        for event in iv.inside((*trace.cpu_ops, *trace.python), [window])
        if event["tid"] == thread and event["dur"] >= _SHORTEST_FRAME_US
    ]
    return [*annotations, *runtime, *device, *host]


def _slim(event: Event) -> dict[str, Any]:
    kept = {key: event[key] for key in ("ph", "cat", "name", "pid", "tid", "ts", "dur")}
    return kept | {"args": {key: value for key, value in event.get("args", {}).items() if key in _KEPT_ARGUMENTS}}
