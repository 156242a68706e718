"""FP8 (e4m3fn) quantisation: activations per token, weights per output channel, both by absmax (SPEC M5)."""

from __future__ import annotations

import torch

from flashrec.kernels._triton import after_previous, jit, next_power_of_2, overlap, tl
from flashrec.kernels.gemm_plan import empty_rows

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
ABSMAX_FLOOR = 1e-10
"""A row below this is quantised as if it reached it, so that an all-zero row has a finite scale."""


def wide(x: torch.Tensor) -> torch.Tensor:
    """``x`` in float32, or as it is in float64: references run in both."""
    return x if x.dtype == torch.float64 else x.float()


def quantize_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises each row of ``values[R, C]`` by its largest magnitude.

    ``scale = absmax / 448``; the codes are ``values * (1 / scale)``, with the one division a row in IEEE
    float32 so that a device kernel can reach the same codes. Returns (codes e4m3fn [R, C], scale f32 [R]).
    """
    exact = wide(values)
    largest = exact.abs().amax(dim=-1).clamp(min=ABSMAX_FLOOR)
    # By a tensor: torch on CUDA multiplies by a Python number's rounded reciprocal instead of dividing.
    scale = largest / torch.full_like(largest, FP8_MAX)
    codes = (exact * scale.reciprocal().unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return codes, scale


def quant_per_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Dynamic per-token quantisation of ``x[T, H]``: (codes e4m3fn [T, H], scale f32 [T, 1])."""
    codes, scale = quantize_rows(x)
    return codes, scale.unsqueeze(-1)


def quantize_weight(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises a weight ``w[out, in]`` per output channel: (codes e4m3fn [out, in], scale f32 [out])."""
    return quantize_rows(w)


@jit
def row_scale_fp8(absmax: tl.tensor, absmax_floor: tl.tensor) -> tl.tensor:
    """Device: the scale of a row whose largest magnitude is ``absmax``; the division is IEEE, as in
    :func:`quantize_rows`."""
    return tl.div_rn(tl.maximum(absmax, absmax_floor), 448.0)


@jit
def codes_fp8(values: tl.tensor, row_scale: tl.tensor, codes: tl.tensor) -> tl.tensor:
    """Device: float32 ``values`` as FP8 of the dtype that ``codes`` points to; the clamp precedes the cast."""
    scaled = values * tl.div_rn(1.0, row_scale)
    clamped = tl.minimum(tl.maximum(scaled, -448.0), 448.0)
    return clamped.to(codes.dtype.element_ty)


@jit
def store_row_fp8(
    values: tl.tensor,
    codes: tl.tensor,
    scale: tl.tensor,
    row: tl.tensor,
    columns: tl.tensor,
    mask: tl.tensor,
    size: tl.tensor,
    absmax_floor: tl.tensor,
) -> None:
    """Device: quantises one row held in float32 ``values`` and stores its codes and its scale."""
    row_scale = row_scale_fp8(tl.max(tl.abs(tl.where(mask, values, 0.0)), axis=0), absmax_floor)
    tl.store(codes + row * size + columns, codes_fp8(values, row_scale, codes), mask=mask)
    tl.store(scale + row, row_scale)


@jit
def _quant_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scale: tl.tensor,
    x_stride: tl.tensor,
    size: tl.tensor,
    absmax_floor: tl.tensor,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One row a program: ``x[T, size]`` (row stride ``x_stride``) to ``codes[T, size]`` and ``scale[T]``."""
    after_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < size
    values = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    store_row_fp8(values, codes, scale, row, columns, mask, size, absmax_floor)


def row_warps(block: int) -> int:
    """Warps for a program that holds one row of ``block`` elements: about 16 elements a thread."""
    return min(16, max(1, next_power_of_2(block) // 512))


def empty_codes(x: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Unwritten (codes [T, size], scale [T, 1]) for the rows of ``x``."""
    codes = empty_rows(x.shape[0], size, FP8, x.device)
    return codes, torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)


def quant_per_token_triton(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`quant_per_token` in one pass over ``x``, whose last axis must be contiguous."""
    rows, size = x.shape
    codes, scale = empty_codes(x, size)
    block = next_power_of_2(size)
    if rows:
        _quant_kernel[(rows,)](
            x,
            codes,
            scale,
            x.stride(0),
            size,
            ABSMAX_FLOOR,
            BLOCK=block,
            num_warps=row_warps(block),
            **overlap(),
        )
    return codes, scale
