"""Matrix products of the layers: ``x @ w.T`` in the model's dtype, and W8A8 FP8 (per token x per channel)."""

from __future__ import annotations

import torch
from torch.nn import functional

from flashrec.kernels.quantize import wide

CPU_ROW_MULTIPLE = 16
"""On a CPU, float32 matmul rows differ in their last bits with M below about 12 and are identical above
(torch 2.13, one and two threads): padding M to this multiple makes a row's bits independent of its batch."""


def _product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    rows = x.shape[0]
    if x.device.type != "cpu" or rows % CPU_ROW_MULTIPLE == 0:
        return x @ w.T
    padding = -rows % CPU_ROW_MULTIPLE
    return (functional.pad(x, (0, 0, 0, padding)) @ w.T)[:rows]


def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """``x[T, in] @ w[out, in].T`` -> [T, out] in ``x.dtype``; a row's bits do not depend on T on a CPU."""
    return _product(x, w)


def linear_fp8(
    x_fp8: torch.Tensor,
    x_scale: torch.Tensor,
    w_fp8: torch.Tensor,
    w_scale: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """W8A8 product of dequantised operands, in float32, rounded once to ``out_dtype``.

    ``x_fp8`` e4m3fn [T, in] with ``x_scale`` f32 [T, 1]; ``w_fp8`` e4m3fn [out, in], ``w_scale`` f32 [out].
    """
    return (_product(wide(x_fp8), wide(w_fp8)) * x_scale * w_scale).to(out_dtype)


def configure_cublas() -> None:
    """Makes bf16 products on CUDA independent of the batch: cuBLASLt, no split-K, no reduced precision.

    H200, torch 2.11, 2026-11-29: rows of a K = 6,144 product were then identical for every M >= 8 tried;
    with the default library they differed at M <= 128.
    """
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)


CUBLAS_MIN_ROWS = 8


def linear_cublas(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """:func:`linear` through cuBLASLt, as :func:`configure_cublas` sets it up."""
    rows = x.shape[0]
    if rows >= CUBLAS_MIN_ROWS:
        return x @ w.T
    return (functional.pad(x, (0, 0, 0, CUBLAS_MIN_ROWS - rows)) @ w.T)[:rows]


def linear_fp8_scaled_mm(
    x_fp8: torch.Tensor,
    x_scale: torch.Tensor,
    w_fp8: torch.Tensor,
    w_scale: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """:func:`linear_fp8` through ``torch._scaled_mm`` with row-wise scales: both sizes multiples of 16.

    H200, torch 2.11, 2026-11-29, Qwen3-1.7B shapes: bit-identical rows for every M from 1 to 4,096 tried. Fast
    accumulation: 293 us a layer against 337 at M = 4,096; relative error at K = 6,144 2.4e-3 against 1.7e-3,
    most of both the rounding to bf16.
    """
    if x_fp8.shape[0] == 0:
        return torch.empty(0, w_fp8.shape[0], dtype=out_dtype, device=x_fp8.device)
    return torch._scaled_mm(
        _at_16_bytes(x_fp8),
        w_fp8.T,
        scale_a=_at_16_bytes(x_scale),
        scale_b=w_scale.unsqueeze(0),
        out_dtype=out_dtype,
        use_fast_accum=True,
    )


def _at_16_bytes(x: torch.Tensor) -> torch.Tensor:
    """``x``, or a copy of it where it does not start at a multiple of 16 bytes, as cuBLASLt demands."""
    return x if x.data_ptr() % 16 == 0 else x.clone()
