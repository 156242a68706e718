"""A program captured as one CUDA graph (SPEC P1)."""

from __future__ import annotations

import functools
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flashrec.errors import CaptureError

_PACKAGE = Path(__file__).parents[1]


@functools.cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """One stream for all captures: the allocator reuses a block of a graph's memory on its own stream only."""
    return torch.cuda.Stream(device)


_cost: dict[str, float] = {}


def capture_cost() -> dict[str, float]:
    """What this process's captures took: ``capture_seconds``, each one's eager launch included, and ``graph_bytes``,
    the device memory that they made the allocator reserve. Empty where nothing was captured."""
    return dict(_cost)


def _count(seconds: float, reserved: int) -> None:
    _cost["capture_seconds"] = _cost.get("capture_seconds", 0.0) + seconds
    _cost["graph_bytes"] = _cost.get("graph_bytes", 0) + reserved


class CapturedProgram:
    """``run`` recorded once on static buffers, and replayed; :attr:`output` is overwritten by every replay.

    Graphs that share ``memory`` may not run at the same time: one stream replays them all. Capturing also
    launches ``run`` eagerly once before, which compiles its kernels and fills library caches.

    Raises:
        CaptureError: something in ``run`` cannot be captured; the message names the operation. There is no
            silent eager run instead.
    """

    def __init__(self, run: Callable[[], torch.Tensor], name: str, memory: Any) -> None:
        started = time.perf_counter()
        self._graph = torch.cuda.CUDAGraph()
        stream = _capture_stream(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                run()
                stream.synchronize()
                reserved = torch.cuda.memory_reserved()
                self._graph.capture_begin(pool=memory, capture_error_mode="thread_local")
                try:
                    self.output = run()
                finally:
                    self._graph.capture_end()
        except Exception as error:
            raise CaptureError(
                f"CUDA graph capture of {name} failed at {_operation(error)}: {error}; "
                "--disable-cuda-graph runs it step by step"
            ) from error
        torch.cuda.current_stream().wait_stream(stream)
        _count(time.perf_counter() - started, torch.cuda.memory_reserved() - reserved)

    def replay(self) -> torch.Tensor:
        """Launch the graph on the current stream; the result is valid until the next replay."""
        self._graph.replay()
        return self.output


def _operation(error: BaseException) -> str:
    """The innermost line of this package on the error's stack."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _PACKAGE in Path(frame.filename).parents]
    if not frames:
        return "an unknown operation"
    frame = frames[-1]
    return f"{Path(frame.filename).relative_to(_PACKAGE)}:{frame.lineno} ({frame.line})"
