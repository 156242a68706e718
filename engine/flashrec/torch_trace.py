"""torch's profiler, started safely beside other threads, and its trace as a file."""

from __future__ import annotations

import contextlib
import functools
import gzip
import importlib
import os
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path

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


def write_trace(recording: torch.profiler.profile, path: Path) -> None:
    """Write a stopped profile to ``path`` as one gzip stream; the file appears whole or not at all."""
    plain = path.with_name(f".{path.name}.json.partial")
    packed = path.with_name(f".{path.name}.partial")
    try:
        recording.export_chrome_trace(str(plain))
        with plain.open("rb") as source, packed.open("wb") as raw:
            with gzip.GzipFile(filename="", fileobj=raw, mode="wb", compresslevel=3) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            raw.flush()
            os.fsync(raw.fileno())
        packed.replace(path)
    finally:
        plain.unlink(missing_ok=True)
        packed.unlink(missing_ok=True)
