"""RMSNorm over the separate residual stream, with or without an FP8 output."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from flashrec.batch import Activation, Quantized
from flashrec.kernels.ops import Ops
from flashrec.layers.weight import WeightTarget


class RMSNorm:
    """``norm(x, residual) -> (normed, residual + x)``.

    ``quantize`` makes the output the FP8 activation of the projection that follows, in one kernel.
    """

    def __init__(
        self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device, quantize: bool = False
    ) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.eps = eps
        self.quantize = quantize

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, ops: Ops) -> tuple[Activation, torch.Tensor]:
        """``x`` and ``residual`` [T, H]; ``None`` starts the residual stream with ``x``."""
        if self.quantize:
            values, scale, residual = ops.add_rms_norm_quant(x, residual, self.weight, self.eps)
            return Quantized(values, scale), residual
        normed, residual = ops.add_rms_norm(x, residual, self.weight, self.eps)
        return normed, residual

    def targets(self, name: str) -> Iterator[WeightTarget]:
        yield WeightTarget(f"{name}.weight", tuple(self.weight.shape), self.weight.copy_)
