"""Faults that only a device's trace shows: what was asked of it is right, how it did it is not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch
from torch.nn import functional

from flashrec.batch import Activation, Quantized
from flashrec.kernels.ops import Ops
from flashrec.layers.linear import Linear
from flashrec.runtime.graph import CapturedProgram
from flashrec.runtime.stage import DecodeStage
from flashrec_harness.faults.registry import fault, on_gpu

_BYTES = 64 << 20


@fault("eager-decode", on_gpu("decode by graph replay"))
def eager_decode() -> Iterator[None]:
    """Decode is launched kernel by kernel, although its graphs are captured."""
    real = DecodeStage.run

    def run(self: DecodeStage, *wave: Any) -> torch.Tensor:
        with mock.patch.object(DecodeStage, "uses_graphs", property(lambda _: False)):
            return real(self, *wave)

    with mock.patch.object(DecodeStage, "run", run):
        yield


@fault("bf16-under-fp8", on_gpu("FP8 GEMMs are FP8", fp8=True))
def bf16_under_fp8() -> Iterator[None]:
    """The projections of an FP8 checkpoint dequantise both operands and multiply in bf16."""
    real, weights = Linear.__call__, WeakKeyDictionary[Linear, torch.Tensor]()

    def call(self: Linear, x: Activation, ops: Ops) -> torch.Tensor:
        if self.weight_scale is None:
            return real(self, x, ops)
        if self not in weights:
            weights[self] = (self.weight.float() * self.weight_scale.unsqueeze(1)).to(self.dtype)
        plain = (x.values.float() * x.scale).to(self.dtype) if isinstance(x, Quantized) else x
        return functional.linear(plain, weights[self])

    with mock.patch.object(Linear, "__call__", call):
        yield


@fault("sync-in-decode", on_gpu("no stalls in steady state"))
def sync_in_decode() -> Iterator[None]:
    """The host waits for the device after every replay of a graph."""
    real = CapturedProgram.replay

    def replay(self: CapturedProgram) -> torch.Tensor:
        output = real(self)
        torch.cuda.current_stream().synchronize()
        return output

    with mock.patch.object(CapturedProgram, "replay", replay):
        yield


@fault("allocation-per-step", on_gpu("no stalls in steady state"))
def allocation_per_step() -> Iterator[None]:
    """Before every replay of a graph a buffer is allocated from the driver and given back to it."""
    real = CapturedProgram.replay

    def replay(self: CapturedProgram) -> torch.Tensor:
        torch.empty(_BYTES, dtype=torch.uint8, device=self.output.device)
        torch.cuda.empty_cache()
        return real(self)

    with mock.patch.object(CapturedProgram, "replay", replay):
        yield
