"""The SwiGLU feed-forward block, on one fused gate/up GEMM."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from flashrec.batch import Activation, Quantized
from flashrec.kernels.ops import Ops
from flashrec.layers.linear import Linear
from flashrec.layers.weight import WeightTarget


class SwiGLU:
    """``down(silu(gate(x)) * up(x))``. ``quantize`` fuses the activation with its FP8 quantisation."""

    def __init__(
        self, hidden: int, inter: int, *, dtype: torch.dtype, device: torch.device, fp8: bool, quantize: bool
    ) -> None:
        self.gate_up = Linear((("gate_proj", inter), ("up_proj", inter)), hidden, dtype=dtype, device=device, fp8=fp8)
        self.down = Linear((("down_proj", hidden),), inter, dtype=dtype, device=device, fp8=fp8)
        self.quantize = quantize

    def __call__(self, x: Activation, ops: Ops) -> torch.Tensor:
        """From [T, H] to [T, H]."""
        gate_up = self.gate_up(x, ops)
        act: Activation = Quantized(*ops.silu_mul_quant(gate_up)) if self.quantize else ops.silu_mul(gate_up)
        return self.down(act, ops)

    def targets(self, prefix: str, *, scales_in_checkpoint: bool) -> Iterator[WeightTarget]:
        yield from self.gate_up.targets(prefix, scales_in_checkpoint=scales_in_checkpoint)
        yield from self.down.targets(prefix, scales_in_checkpoint=scales_in_checkpoint)
