"""Faults of what is measured, and of how: time, a stored baseline, a profiler that ran, a trace that was cut off."""

from __future__ import annotations

import json
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import orjson
import torch

from flashrec import torch_trace
from flashrec.runtime.engine import Engine
from flashrec.runtime.flight import Flight
from flashrec.runtime.member import Member
from flashrec.torch_trace import Span
from flashrec_harness import baselines
from flashrec_harness.faults.registry import Catch, fault
from flashrec_harness.outcome import Outcome
from flashrec_harness.perf import profiled

clock: Callable[[], float] = time.perf_counter
wait: Callable[[float], None] = time.sleep
"""Seconds; :mod:`flashrec_harness.faults.simulated` puts a simulated clock in their place."""

_SIMULATED = "flashrec_harness.faults.simulated"
_SLOWER = 0.05


@fault("slowdown", Catch("perf", "against baseline", module=_SIMULATED))
def slowdown() -> Iterator[None]:
    """Every wave takes 5 % longer."""
    launch, outcomes_of = Engine.launch, Engine.outcomes
    started: deque[float] = deque()

    def launching(self: Engine, members: list[Member]) -> Flight:
        now = clock()
        flight = launch(self, members)
        started.append(now)
        return flight

    def landing(self: Engine, flight: Flight) -> list[Any]:
        outcomes = outcomes_of(self, flight)
        wait(_SLOWER * (clock() - started.popleft()))
        return outcomes

    with mock.patch.object(Engine, "launch", launching), mock.patch.object(Engine, "outcomes", landing):
        yield


@fault("edited-baseline", Catch("perf", "against baseline", Outcome.INVALID, module=_SIMULATED))
def edited_baseline() -> Iterator[None]:
    """Somebody has lowered a figure of the stored baseline by 10 %, by hand."""
    real = baselines.load

    def load(path: Path) -> baselines.Baseline:
        body = json.loads(path.read_text(encoding="utf-8"))
        cell = next(iter(body["summary"]))
        body["summary"][cell]["throughput"]["centre"] *= 0.9
        with tempfile.TemporaryDirectory() as directory:
            edited = Path(directory) / path.name
            edited.write_text(json.dumps(body), encoding="utf-8")
            return real(edited)

    with mock.patch.object(baselines, "load", load):
        yield


@fault("profiled-process", Catch("perf", "measurement is valid", Outcome.INVALID))
def profiled_process() -> Iterator[None]:
    """A torch profiler runs in the measuring process before its rounds are timed."""
    real = profiled.watch

    def watch() -> None:
        real()
        with torch.profiler.profile():
            torch.ones(1) + 1

    with mock.patch.object(profiled, "watch", watch):
        yield


@fault("corrupted-trace", Catch("trace", "trace is whole", Outcome.INVALID))
def corrupted_trace() -> Iterator[None]:
    """The last third of a trace's events is lost when it is exported."""
    real = torch_trace.write_trace

    def write_trace(recording: torch.profiler.profile, path: Path, spans: Sequence[Span] = ()) -> None:
        export = recording.export_chrome_trace

        def cut(target: str) -> None:
            export(target)
            body = orjson.loads(Path(target).read_bytes())
            events = body["traceEvents"]
            body["traceEvents"] = events[: len(events) * 2 // 3]
            Path(target).write_bytes(orjson.dumps(body))

        with mock.patch.object(recording, "export_chrome_trace", cut):
            real(recording, path, spans)

    with mock.patch("flashrec.profiler.write_trace", write_trace):
        yield
