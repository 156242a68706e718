"""The gated MLP's activation: SiLU of the gate times the up projection, alone or with FP8 quantisation."""

from __future__ import annotations

import torch
from torch.nn import functional

from flashrec.kernels._triton import jit, next_power_of_2, tl
from flashrec.kernels.quantize import ABSMAX_FLOOR, empty_codes, quant_per_token, row_warps, store_row_fp8


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` for ``gate_up[T, 2 * I]``, gate first: [T, I]; both steps round to the dtype."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def silu_mul_quant(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`silu_mul`, then per-token FP8 of the rounded value: (codes e4m3fn [T, I], scale f32 [T, 1])."""
    return quant_per_token(silu_mul(gate_up))


@jit
def _silu_mul_kernel(
    gate_up: tl.tensor,
    out: tl.tensor,
    scale: tl.tensor,
    row_stride: tl.tensor,
    size: tl.tensor,
    absmax_floor: tl.tensor,
    BLOCK: tl.constexpr,
    QUANTIZE: tl.constexpr,
) -> None:
    """One row a program: ``gate_up[T, 2 * size]`` by row stride to ``out[T, size]``, or codes and scale."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < size
    dtype = gate_up.dtype.element_ty
    start = gate_up + row * row_stride
    gate = tl.load(start + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(start + size + columns, mask=mask, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    product = (activated * up).to(dtype)
    if QUANTIZE:
        store_row_fp8(product.to(tl.float32), out, scale, row, columns, mask, size, absmax_floor)
    else:
        tl.store(out + row * size + columns, product, mask=mask)


def _launch(gate_up: torch.Tensor, out: torch.Tensor, scale: torch.Tensor | None) -> None:
    rows, size = out.shape
    block = next_power_of_2(size)
    if rows:
        _silu_mul_kernel[(rows,)](
            gate_up,
            out,
            out if scale is None else scale,
            gate_up.stride(0),
            size,
            ABSMAX_FLOOR,
            BLOCK=block,
            QUANTIZE=scale is not None,
            num_warps=row_warps(block),
        )


def silu_mul_triton(gate_up: torch.Tensor) -> torch.Tensor:
    """:func:`silu_mul` for ``gate_up`` with a contiguous last axis."""
    rows, width = gate_up.shape
    out = torch.empty(rows, width // 2, dtype=gate_up.dtype, device=gate_up.device)
    _launch(gate_up, out, None)
    return out


def silu_mul_quant_triton(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`silu_mul_quant` in one pass."""
    codes, scale = empty_codes(gate_up, gate_up.shape[1] // 2)
    _launch(gate_up, codes, scale)
    return codes, scale
