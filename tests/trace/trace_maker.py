"""Chrome traces as Kineto writes them, made by hand: waves of one prefill and one decode on a GPU."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LAYERS = 2
FP8_KERNEL = "nvjet_sm90_qqtst_128x128_128x6_1x2_h_bz_coopA_TNT"
BF16_KERNEL = "nvjet_sm90_tst_64x64_64x13_4x1_v_bz_TNT"
_ENGINE, _DEVICE = 7, 0


@dataclass
class TraceMaker:
    """``eager`` launches decode's kernels one by one; ``bf16`` runs the layers' GEMMs in bf16; ``sync`` waits
    inside every decode span; ``allocate`` takes memory from the driver there and gives it back; ``launch_bound``
    makes prefill wait for its launches; ``lost`` drops a kernel of one replay; ``early`` lets a kernel start before
    its launch. ``nodeless`` leaves out the node ids of graph kernels, as torch 2.11 does; ``pipelined`` launches
    each wave before the last one is finished.
    """

    waves: int = 5
    eager: bool = False
    bf16: bool = False
    sync: bool = False
    allocate: bool = False
    launch_bound: bool = False
    lost: bool = False
    early: bool = False
    nodeless: bool = False
    pipelined: bool = False
    events: list[dict[str, Any]] = field(default_factory=list)
    now: float = 1e9
    device_free: float = 0.0
    correlation: int = 0

    def span(self, name: str, body: Callable[[], None]) -> None:
        start = self.now
        body()
        self.now += 5
        self._event("user_annotation", name, start, self.now - start, _ENGINE, {})

    def _event(self, category: str, name: str, at: float, length: float, thread: int, args: dict[str, Any]) -> None:
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, "ts": at, "dur": length, "args": args}
        )

    def call(self, name: str, length: float = 4) -> int:
        self.correlation += 1
        self._event("cuda_runtime", name, self.now, length, _ENGINE, {"correlation": self.correlation})
        self.now += length
        return self.correlation

    def kernel(self, name: str, length: float, correlation: int, node: int | None = None) -> None:
        start = self.now - 500 if self.early and self.correlation == 3 else max(self.device_free, self.now)
        args: dict[str, Any] = {"correlation": correlation, "stream": 7, "device": 0}
        args |= {"grid": [int(length), 1, 1], "block": [128, 1, 1]}
        if node is not None and not self.nodeless:
            args["graph node id"] = node
        self._event("kernel", name, start, length, _DEVICE, args)
        self.device_free = start + length

    def layer_kernels(self) -> list[tuple[str, float]]:
        gemm = BF16_KERNEL if self.bf16 else FP8_KERNEL
        return [("rms_norm_quantize", 3), *[(gemm, 15)] * 4, ("decode_context_attention", 12)]

    def step_kernels(self) -> list[tuple[str, float]]:
        head = [(BF16_KERNEL, 20.0), ("expand_kernel", 5.0)]
        return [("embedding_kernel", 2.0), *self.layer_kernels() * LAYERS, *head]

    def prefill(self) -> None:
        for name, length in self.step_kernels():
            self.kernel(name, length * 4, self.call("cudaLaunchKernel", 300 if self.launch_bound else 2))

    def decode(self, wave: int) -> None:
        steps = self.step_kernels() * 2
        if self.allocate:
            self.call("cudaMalloc", 60)
            self.call("cudaFree", 40)
        if self.eager:
            for name, length in steps:
                self.kernel(name, length, self.call("cudaLaunchKernel", 1))
        else:
            launched = self.call("cudaGraphLaunch", 30)
            for node, (name, length) in enumerate(steps[:-1] if self.lost and wave == 2 else steps):
                self.kernel(name, length, launched, node=1000 + node)
        if self.sync:
            self.call("cudaStreamSynchronize", 100)

    def finalize(self) -> None:
        wait = max(self.device_free - self.now, 0) + 5
        self.call("cudaStreamSynchronize", wait)

    def build(self) -> dict[str, Any]:
        for wave in range(self.waves):
            self.span("flashrec.batch.wait", lambda: None)
            self.span("flashrec.prefill", self.prefill)
            self.span("flashrec.decode", lambda wave=wave: self.decode(wave))  # type: ignore[misc]
            if not self.pipelined or wave:
                self.span("flashrec.finalize", self.finalize)
            self.now += 40
        if self.pipelined:
            self.span("flashrec.finalize", self.finalize)
        for name in ("flashrec.tokenize", "flashrec.respond"):
            self._event("user_annotation", name, 1e9, 10, 9, {})
        end = {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": self.now + 1}
        return {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}],
            "traceEvents": [*self.events, end],
        }


def write(directory: Path, body: dict[str, Any], name: str = "t.trace.json.gz") -> Path:
    path = directory / name
    path.write_bytes(gzip.compress(json.dumps(body).encode()))
    return path
