"""The gated MLP's activation: SiLU of the gate times the up projection, alone or with FP8 quantisation."""

from __future__ import annotations

import torch
from torch.nn import functional

from flashrec.kernels._triton import after_previous, jit, next_power_of_2, overlap, tl
from flashrec.kernels.gemm_plan import empty_rows
from flashrec.kernels.quantize import ABSMAX_FLOOR, codes_fp8, empty_codes, quant_per_token, row_scale_fp8, row_warps

MOST_WARPS = 8
"""H200, 2026-11-30, 19,720 rows of 6,144, us: 141 on 4 or 8 warps, 159 on 16; by bytes 144 at 4.2 TB/s."""


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` for ``gate_up[T, 2 * I]``, gate first: [T, I]; both steps round to the dtype."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def silu_mul_quant(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`silu_mul`, then per-token FP8 of the rounded value: (codes e4m3fn [T, I], scale f32 [T, 1])."""
    return quant_per_token(silu_mul(gate_up))


@jit
def _gated(start: tl.tensor, size: tl.tensor, columns: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Device: the rounded product at ``columns`` of the row at ``start``, in its dtype."""
    dtype = start.dtype.element_ty
    gate = tl.load(start + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(start + size + columns, mask=mask, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return (activated * up).to(dtype)


@jit
def _silu_mul_kernel(
    gate_up: tl.tensor,
    out: tl.tensor,
    scale: tl.tensor,
    row_stride: tl.tensor,
    size: tl.tensor,
    absmax_floor: tl.tensor,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    QUANTIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One row a program: ``gate_up[T, 2 * size]`` by row stride to ``out[T, size]``, or codes and scale.

    A row is held as ``BLOCK`` columns and ``REST`` more, both powers of two: 6,144 as 4,096 and 2,048.
    """
    after_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    start = gate_up + row * row_stride
    target = out + row * size
    columns = tl.arange(0, BLOCK)
    mask = columns < size
    product = _gated(start, size, columns, mask)
    further = BLOCK + tl.arange(0, REST)
    further_mask = further < size
    further_product = _gated(start, size, further, further_mask)
    if QUANTIZE:
        wide = product.to(tl.float32)
        further_wide = further_product.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(wide), axis=0), tl.max(tl.abs(further_wide), axis=0))
        row_scale = row_scale_fp8(largest, absmax_floor)
        tl.store(target + columns, codes_fp8(wide, row_scale, out), mask=mask)
        tl.store(target + further, codes_fp8(further_wide, row_scale, out), mask=further_mask)
        tl.store(scale + row, row_scale)
    else:
        tl.store(target + columns, product, mask=mask)
        tl.store(target + further, further_product, mask=further_mask)


def _launch(gate_up: torch.Tensor, out: torch.Tensor, scale: torch.Tensor | None) -> None:
    rows, size = out.shape
    block = max(1, next_power_of_2(size) // 2)
    rest = next_power_of_2(max(1, size - block))
    if rows:
        _silu_mul_kernel[(rows,)](
            gate_up,
            out,
            out if scale is None else scale,
            gate_up.stride(0),
            size,
            ABSMAX_FLOOR,
            BLOCK=block,
            REST=rest,
            QUANTIZE=scale is not None,
            num_warps=min(MOST_WARPS, row_warps(block + rest)),
            **overlap(),
        )


def silu_mul_triton(gate_up: torch.Tensor) -> torch.Tensor:
    """:func:`silu_mul` for ``gate_up`` with a contiguous last axis."""
    rows, width = gate_up.shape
    out = empty_rows(rows, width // 2, gate_up.dtype, gate_up.device)
    _launch(gate_up, out, None)
    return out


def silu_mul_quant_triton(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`silu_mul_quant` in one pass."""
    codes, scale = empty_codes(gate_up, gate_up.shape[1] // 2)
    _launch(gate_up, codes, scale)
    return codes, scale
