"""torch's profiler, started safely beside other threads, and its trace as a file."""

from __future__ import annotations

import contextlib
import functools
import gzip
import importlib
import os
import re
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import orjson
import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity


@functools.cache
def preload() -> None:
    """Import what torch's profiler would import at its first start, on the engine thread: it takes seconds.

    Imported inside a recording, a module's code object is freed before ``with_stack`` reads its name: the
    first trace of a process then held garbage (torch 2.13, 2026-11-29).
    """
    for name in ("torch._inductor.config", "torch.profiler._cupti_monitor", "torch.profiler.python_tracer"):
        with contextlib.suppress(ModuleNotFoundError):  # private names; other versions have other ones
            importlib.import_module(name)


def start_recording(
    activities: Sequence[ProfilerActivity], *, with_stack: bool, record_shapes: bool
) -> torch.profiler.profile:
    """A running torch profile of all threads. Raises what torch raises, a :class:`RuntimeError`."""
    preload()
    recording = torch.profiler.profile(
        activities=activities,
        with_stack=with_stack,
        record_shapes=record_shapes,
        experimental_config=_ExperimentalConfig(profile_all_threads=True),
    )
    with warnings.catch_warnings():
        # torch 2.11 warns that a second cycle would clear the first; there is one.
        warnings.filterwarnings("ignore", message=".*Profiler clears events")
        recording.start()
    return recording


@dataclass(frozen=True, slots=True)
class Span:
    """A named piece of work of a thread, maybe of another process; times in nanoseconds since the epoch."""

    name: str
    process: int
    thread: int
    start_ns: int
    end_ns: int


def write_trace(recording: torch.profiler.profile, path: Path, spans: Sequence[Span] = ()) -> None:
    """Write a stopped profile to ``path`` as one gzip stream; the file appears whole or not at all.

    ``spans`` of other processes go in among torch's own. Raises :class:`ValueError` where torch's file has no place
    for them.
    """
    plain = path.with_name(f".{path.name}.json.partial")
    packed = path.with_name(f".{path.name}.partial")
    try:
        recording.export_chrome_trace(str(plain))
        with plain.open("rb") as source, packed.open("wb") as raw:
            with gzip.GzipFile(filename="", fileobj=raw, mode="wb", compresslevel=3) as target:
                if spans:
                    target.write(_opening(source, _base_ns(plain), spans))
                shutil.copyfileobj(source, target, 1 << 20)
            raw.flush()
            os.fsync(raw.fileno())
        packed.replace(path)
    finally:
        plain.unlink(missing_ok=True)
        packed.unlink(missing_ok=True)


_EVENTS = re.compile(rb'"traceEvents": *\[')
_BASE = re.compile(rb'"baseTimeNanoseconds": *(\d+)')
_PLACE = 1 << 16
"""Torch writes both within so many bytes of the file's beginning or its end."""


def _base_ns(plain: Path) -> int:
    """What the file's times count from; its first or its last lines say so."""
    with plain.open("rb") as file:
        head = file.read(_PLACE)
        file.seek(max(0, plain.stat().st_size - _PLACE))
        found = _BASE.search(head) or _BASE.search(file.read())
    if found is None:
        raise ValueError("torch's trace names no baseTimeNanoseconds: spans of other processes cannot be placed")
    return int(found[1])


def _opening(source: BinaryIO, base_ns: int, spans: Sequence[Span]) -> bytes:
    """The first bytes of ``source``, which goes on behind them, with ``spans`` as the first events (times in us)."""
    head = source.read(_PLACE)
    found = _EVENTS.search(head)
    if found is None:
        raise ValueError("torch's trace has no traceEvents near its beginning: spans of other processes have no place")
    events = [
        {
            "ph": "X",
            "cat": "user_annotation",
            "name": span.name,
            "pid": span.process,
            "tid": span.thread,
            "ts": (span.start_ns - base_ns) / 1e3,
            "dur": (span.end_ns - span.start_ns) / 1e3,
        }
        for span in spans
    ]
    written = b"".join(orjson.dumps(event) + b",\n" for event in events)
    return head[: found.end()] + written + head[found.end() :]
