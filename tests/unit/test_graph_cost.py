"""What capturing costs: counted where something is captured, absent where nothing is."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_engine import open_engine, write_shop

from flashrec.errors import CaptureError
from flashrec.runtime import graph


class FakeCuda:
    """A device on which each capture takes two seconds and makes the allocator reserve 3 MiB."""

    def __init__(self) -> None:
        self.clock, self.reserved = 0.0, 10 << 20

    def capture_begin(self, **_: Any) -> None:
        self.clock += 2.0
        self.reserved += 3 << 20

    def capture_end(self) -> None:
        pass


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    stream = SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)
    monkeypatch.setattr(graph, "_cost", {})
    monkeypatch.setattr(graph, "_capture_stream", lambda index: stream)
    monkeypatch.setattr(graph, "time", SimpleNamespace(perf_counter=lambda: fake.clock))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: fake)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda one: nullcontext())
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: fake.reserved)
    return fake


def test_captures_add_up_and_the_eager_launch_is_not_graph_memory(device: FakeCuda) -> None:
    def run() -> torch.Tensor:
        if device.clock == 0.0:
            device.clock, device.reserved = 0.5, 50 << 20
        return torch.zeros(1)

    assert graph.capture_cost() == {}
    graph.CapturedProgram(run, "a program", None)
    graph.CapturedProgram(run, "another", None)
    assert graph.capture_cost() == {"capture_seconds": 4.5, "graph_bytes": 6 << 20}


def test_a_capture_that_failed_is_not_counted(device: FakeCuda) -> None:
    def run() -> torch.Tensor:
        raise RuntimeError("cannot be captured")

    with pytest.raises(CaptureError):
        graph.CapturedProgram(run, "a program", None)
    assert graph.capture_cost() == {}


def test_an_engine_on_a_cpu_tells_of_no_graphs_cost(tmp_path: Path) -> None:
    engine = open_engine(write_shop(tmp_path))
    assert {"capture_seconds", "graph_bytes"}.isdisjoint(engine.stats())
    engine.close()


def test_an_engine_tells_what_its_captures_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine(write_shop(tmp_path))
    monkeypatch.setattr(graph, "_cost", {"capture_seconds": 1.75, "graph_bytes": 4096})
    assert {"capture_seconds": 1.75, "graph_bytes": 4096}.items() <= engine.stats().items()
    engine.close()
