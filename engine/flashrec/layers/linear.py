"""Projections: one GEMM for several checkpoint tensors, in the model's dtype or FP8."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from flashrec.batch import Activation, Quantized
from flashrec.kernels.ops import Ops
from flashrec.kernels.quantize import quantize_weight
from flashrec.layers.weight import Store, WeightTarget


class Linear:
    """``y = x @ W.T`` with W [out, in] made of ``parts`` stacked along the output (SPEC M4).

    With ``fp8``, W is e4m3 with one float32 scale per output row, the activation is FP8 with one scale per
    token, and the product comes back in ``dtype``. Parts keep their own scales: nothing is requantised.
    """

    def __init__(
        self,
        parts: Sequence[tuple[str, int]],
        in_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        fp8: bool,
    ) -> None:
        self.parts = tuple(parts)
        self.dtype = dtype
        out_size = sum(size for _, size in self.parts)
        stored = torch.float8_e4m3fn if fp8 else dtype
        self.weight = torch.empty(out_size, in_size, dtype=stored, device=device)
        self.weight_scale = torch.empty(out_size, dtype=torch.float32, device=device) if fp8 else None

    def __call__(self, x: Activation, ops: Ops) -> torch.Tensor:
        """From [T, in], plain or already quantised, to [T, out] in ``dtype``."""
        product: torch.Tensor
        if self.weight_scale is not None:
            values, scale = x if isinstance(x, Quantized) else ops.quant_per_token(x)
            product = ops.linear_fp8(values, scale, self.weight, self.weight_scale, self.dtype)
        elif isinstance(x, Quantized):
            raise TypeError("an FP8 activation reached a projection whose weight is not FP8")
        else:
            product = ops.linear(x, self.weight)
        return product

    def targets(self, prefix: str, *, scales_in_checkpoint: bool) -> Iterator[WeightTarget]:
        """Where each checkpoint tensor ``<prefix><part>.weight`` (and its scale) goes."""
        start = 0
        for name, size in self.parts:
            rows = slice(start, start + size)
            weight = self.weight[rows]
            if self.weight_scale is None:
                yield WeightTarget(f"{prefix}{name}.weight", tuple(weight.shape), weight.copy_)
            elif scales_in_checkpoint:
                yield WeightTarget(
                    f"{prefix}{name}.weight", tuple(weight.shape), weight.copy_, dtype=torch.float8_e4m3fn
                )
                yield WeightTarget(
                    f"{prefix}{name}.weight_scale",
                    (size,),
                    _fill_scale(self.weight_scale[rows]),
                    aliases=(f"{prefix}{name}.weight_scale_inv",),
                    shapes=((size, 1), (1,), ()),
                )
            else:
                yield WeightTarget(
                    f"{prefix}{name}.weight",
                    tuple(weight.shape),
                    _quantizing(weight, self.weight_scale[rows]),
                )
            start += size


def _fill_scale(rows: torch.Tensor) -> Store:
    def store(scale: torch.Tensor) -> None:
        rows.copy_(scale.reshape(-1).float().expand(rows.shape[0]))

    return store


def _quantizing(weight: torch.Tensor, scale_rows: torch.Tensor) -> Store:
    def store(tensor: torch.Tensor) -> None:
        codes, scale = quantize_weight(tensor.to(weight.device))
        weight.copy_(codes)
        scale_rows.copy_(scale)

    return store
