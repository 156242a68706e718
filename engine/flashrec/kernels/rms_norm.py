"""RMSNorm, alone, with the residual addition before it, and with FP8 quantisation after it."""

from __future__ import annotations

import torch

from flashrec.kernels._triton import after_previous, jit, next_power_of_2, overlap, tl
from flashrec.kernels.quantize import (
    ABSMAX_FLOOR,
    empty_codes,
    quant_per_token,
    row_warps,
    store_row_fp8,
    wide,
)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / rms(x) * weight`` over the last axis of ``x[T, H]``.

    Rounds as Hugging Face's ``Qwen3RMSNorm`` does: float32 inside, cast to ``x.dtype``, times ``weight``.
    """
    exact = wide(x)
    inverse = torch.rsqrt(exact.pow(2).mean(dim=-1, keepdim=True) + eps)
    return (exact * inverse).to(x.dtype) * weight


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds ``x[T, H]`` to the residual stream, in ``x.dtype``, and norms the sum: (normed, new residual)."""
    summed = x if residual is None else x + residual
    return rms_norm(summed, weight, eps), summed


def add_rms_norm_quant(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`add_rms_norm`, then per-token FP8 of the value rounded to ``x.dtype``.

    Returns (codes e4m3fn [T, H], scale f32 [T, 1], new residual [T, H]).
    """
    normed, summed = add_rms_norm(x, residual, weight, eps)
    codes, scale = quant_per_token(normed)
    return codes, scale, summed


@jit
def _rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    scale: tl.tensor,
    summed: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    size: tl.tensor,
    eps: tl.tensor,
    absmax_floor: tl.tensor,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    QUANTIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One row a program. ``x``, ``residual`` [T, size] by row stride; ``out``, ``summed`` contiguous.

    ``out`` holds FP8 codes with ``scale[T]`` when ``QUANTIZE``; ``summed`` is written when ``HAS_RESIDUAL``.
    """
    after_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < size
    dtype = x.dtype.element_ty
    values = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        earlier = tl.load(residual + row * residual_stride + columns, mask=mask, other=0.0).to(tl.float32)
        rounded = (values + earlier).to(dtype)
        tl.store(summed + row * size + columns, rounded, mask=mask)
        values = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, axis=0) / size + eps)
    gain = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    normed = ((values * inverse).to(dtype).to(tl.float32) * gain).to(dtype)
    if QUANTIZE:
        store_row_fp8(normed.to(tl.float32), out, scale, row, columns, mask, size, absmax_floor)
    else:
        tl.store(out + row * size + columns, normed, mask=mask)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    scale: torch.Tensor | None,
) -> torch.Tensor:
    """Runs the kernel into ``out`` (and ``scale``); returns the new residual."""
    rows, size = x.shape
    summed = x if residual is None else torch.empty(rows, size, dtype=x.dtype, device=x.device)
    block = next_power_of_2(size)
    if rows:
        _rms_norm_kernel[(rows,)](
            x,
            x if residual is None else residual,
            weight,
            out,
            out if scale is None else scale,
            summed,
            x.stride(0),
            x.stride(0) if residual is None else residual.stride(0),
            size,
            eps,
            ABSMAX_FLOOR,
            BLOCK=block,
            HAS_RESIDUAL=residual is not None,
            QUANTIZE=scale is not None,
            num_warps=row_warps(block),
            **overlap(),
        )
    return summed


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """:func:`rms_norm` for ``x`` with a contiguous last axis."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, eps, out, None)
    return out


def add_rms_norm_triton(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`add_rms_norm` in one pass."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return out, _launch(x, residual, weight, eps, out, None)


def add_rms_norm_quant_triton(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`add_rms_norm_quant` in one pass."""
    codes, scale = empty_codes(x, x.shape[1])
    summed = _launch(x, residual, weight, eps, codes, scale)
    return codes, scale, summed
