"""A trace file, read and checked: one whole gzip stream, valid JSON, one profile."""

from __future__ import annotations

import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

GZIP_MAGIC = b"\x1f\x8b"
END_MARKER = "Record Window End"
_GZIP_WINDOW = 16 + zlib.MAX_WBITS

Event = dict[str, Any]


class TraceError(Exception):
    """A trace file is not whole; every metric of it would be invalid. The message says what is wrong."""


@dataclass(slots=True)
class RawTrace:
    """The file's events. Times are in microseconds since an origin of the profiler's own.

    ``spans``: host annotations; ``cpu_ops``, ``python``: host operators and Python frames; ``device``:
    kernels, copies and memsets; ``runtime``: CUDA runtime and driver calls.
    """

    path: Path
    spans: list[Event] = field(default_factory=list)
    cpu_ops: list[Event] = field(default_factory=list)
    python: list[Event] = field(default_factory=list)
    device: list[Event] = field(default_factory=list)
    runtime: list[Event] = field(default_factory=list)
    device_names: list[str] = field(default_factory=list)
    end_markers: int = 0
    window_us: tuple[float, float] = (0.0, 0.0)

    @property
    def has_device(self) -> bool:
        """Whether the trace recorded a GPU."""
        return bool(self.device)


_LANES = {
    "user_annotation": "spans",
    "cpu_op": "cpu_ops",
    "python_function": "python",
    "kernel": "device",
    "gpu_memcpy": "device",
    "gpu_memset": "device",
    "cuda_runtime": "runtime",
    "cuda_driver": "runtime",
}


def decompress(data: bytes, name: str) -> bytes:
    """The content of exactly one gzip member. :class:`TraceError` if it is cut short or more follows."""
    inflate = zlib.decompressobj(_GZIP_WINDOW)
    try:
        content = inflate.decompress(data)
    except zlib.error as error:
        raise TraceError(f"{name}: not a gzip stream ({error})") from None
    if not inflate.eof:
        raise TraceError(f"{name}: the gzip stream is cut short; wait until the trace is flushed")
    if inflate.unused_data:
        raise TraceError(f"{name}: {len(inflate.unused_data)} bytes follow the gzip stream: two profiles in one file?")
    return content


def read_trace(path: Path) -> RawTrace:
    """Read ``.json`` or ``.json.gz``, told apart by content. :class:`TraceError` if it is not whole."""
    data = path.read_bytes()
    if data.startswith(GZIP_MAGIC):
        data = decompress(data, path.name)
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise TraceError(f"{path.name}: not JSON ({error})") from None
    if not isinstance(body, dict) or not isinstance(body.get("traceEvents"), list):
        raise TraceError(f"{path.name}: no traceEvents; not a Chrome trace of the torch profiler")
    trace = RawTrace(path)
    trace.device_names = [device.get("name", "?") for device in body.get("deviceProperties", [])]
    for event in body["traceEvents"]:
        if event.get("ph") == "i" and event.get("name") == END_MARKER:
            trace.end_markers += 1
        lane = _LANES.get(event.get("cat"))
        if lane is not None and event.get("ph") == "X":
            getattr(trace, lane).append(event)
    if trace.end_markers != 1:
        raise TraceError(
            f"{path.name}: {trace.end_markers} end markers, expected 1: "
            + ("the recording was cut off" if trace.end_markers == 0 else "two profiles in one file")
        )
    for lane in ("spans", "cpu_ops", "python", "device", "runtime"):
        getattr(trace, lane).sort(key=lambda event: event["ts"])
    timed = [event for lane in (trace.spans, trace.cpu_ops, trace.device, trace.runtime) for event in lane]
    if not timed:
        raise TraceError(f"{path.name}: no timed events; the profiler recorded nothing")
    trace.window_us = (min(e["ts"] for e in timed), max(e["ts"] + e["dur"] for e in timed))
    return trace


def wait_until_complete(path: Path, *, timeout_s: float, poll_s: float = 0.25) -> None:
    """Wait until a trace is flushed: one whole gzip stream whose size no longer changes.

    A flush takes 10 to 30 s on a real model, and what is measured meanwhile is not worth keeping. Raises
    :class:`TraceError` after ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    last_size, reason = -1, "the file does not exist"
    while time.monotonic() < deadline:
        if path.is_file():
            size = path.stat().st_size
            if size == last_size and size > 0:
                try:
                    decompress(path.read_bytes(), path.name)
                except TraceError as error:
                    reason = str(error)
                else:
                    return
            last_size = size
        time.sleep(poll_s)
    raise TraceError(f"{path.name}: not complete after {timeout_s:.0f} s ({reason})")
