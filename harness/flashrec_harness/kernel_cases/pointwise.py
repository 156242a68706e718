"""Cases of the row-wise kernels: norms, the gated activation, quantisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from flashrec_harness.equivalence import CODES_APART, Rule
from flashrec_harness.kernel_cases.base import (
    Argument,
    Collect,
    Draws,
    KernelCase,
    Lane,
    Output,
    draws,
    exact,
    layouts,
    scales,
    with_zero_row,
)

EPS = 1e-6
_CPU_ROWS, _GPU_ROWS = (0, 1, 2, 3, 7, 17, 33), (0, 1, 2, 17, 129, 1009)
_CPU_SIZES, _GPU_SIZES = (1, 2, 63, 64, 65, 100, 127, 128, 129, 257), (2048, 1000)


def _one(result: Any, _: Sequence[Any]) -> list[Output]:
    return [Output("out", result)]


def _summed(result: Any, _: Sequence[Any]) -> list[Output]:
    return [Output("out", result[0]), Output("residual", result[1])]


def code_outputs(codes: torch.Tensor, scale: torch.Tensor, lane: Lane, *, slack: float = 0.0) -> list[Output]:
    """The two outputs of a kernel that quantises what it computed, rounded to the lane's dtype: so is the scale."""
    return [
        Output("codes", codes, Rule.CODES, code_steps=lane.code_steps, code_slack=slack),
        Output("scale", scale, precision=lane.dtype),
    ]


@st.composite
def rms_norm_cases(draw: st.DrawFn, lane: Lane) -> KernelCase:
    """:func:`flashrec.kernels.rms_norm.rms_norm`."""
    rows, size = draw(lane.pick(_CPU_ROWS, _GPU_ROWS)), draw(lane.pick(_CPU_SIZES, _GPU_SIZES))
    data, (pad, offset), scale = draw(draws(lane)), draw(layouts(lane)), draw(scales())
    x = with_zero_row(data.normal(rows, size, scale=scale), draw(st.booleans()))
    weight = data.uniform(size, low=0.5, high=1.5)
    return KernelCase(
        f"{rows} x {size}, pad {pad}, offset {offset}, scale {scale}",
        (Argument(x, pad, offset), Argument(weight), EPS),
        (exact(x), exact(weight), EPS),
        _one,
        {},
    )


def _residual_case(draw: st.DrawFn, lane: Lane, collect: Collect) -> KernelCase:
    rows, size = draw(lane.pick(_CPU_ROWS, _GPU_ROWS)), draw(lane.pick(_CPU_SIZES, _GPU_SIZES))
    data, (pad, offset), scale = draw(draws(lane)), draw(layouts(lane)), draw(scales())
    x = with_zero_row(data.normal(rows, size, scale=scale), draw(st.booleans()))
    residual = data.normal(rows, size, scale=scale) if draw(st.booleans()) else None
    weight = data.uniform(size, low=0.5, high=1.5)
    return KernelCase(
        f"{rows} x {size}, residual {residual is not None}, pad {pad}, offset {offset}, scale {scale}",
        (
            Argument(x, pad, offset),
            None if residual is None else Argument(residual, pad),
            Argument(weight),
            EPS,
        ),
        (exact(x), exact(residual), exact(weight), EPS),
        collect,
        {},
    )


@st.composite
def add_rms_norm_cases(draw: st.DrawFn, lane: Lane) -> KernelCase:
    """:func:`flashrec.kernels.rms_norm.add_rms_norm`."""
    return _residual_case(draw, lane, _summed)


@st.composite
def add_rms_norm_quant_cases(draw: st.DrawFn, lane: Lane) -> KernelCase:
    """:func:`flashrec.kernels.rms_norm.add_rms_norm_quant`."""
    return _residual_case(
        draw,
        lane,
        lambda result, _: [*code_outputs(result[0], result[1], lane), Output("residual", result[2])],
    )


def _row_case(draw: st.DrawFn, lane: Lane, widths: int, collect: Collect) -> KernelCase:
    rows, size = draw(lane.pick(_CPU_ROWS, _GPU_ROWS)), draw(lane.pick(_CPU_SIZES, _GPU_SIZES))
    data, (pad, offset), scale = draw(draws(lane)), draw(layouts(lane)), draw(scales())
    x = with_zero_row(data.normal(rows, widths * size, scale=scale), draw(st.booleans()))
    label = f"{rows} x {widths * size}, pad {pad}, offset {offset}, scale {scale}"
    return KernelCase(label, (Argument(x, pad, offset),), (exact(x),), collect, {})


@st.composite
def silu_mul_cases(draw: st.DrawFn, lane: Lane) -> KernelCase:
    """:func:`flashrec.kernels.silu_mul.silu_mul`."""
    return _row_case(draw, lane, 2, _one)


@st.composite
def silu_mul_quant_cases(draw: st.DrawFn, lane: Lane) -> KernelCase:
    """:func:`flashrec.kernels.silu_mul.silu_mul_quant`."""
    return _row_case(draw, lane, 2, lambda result, _: code_outputs(result[0], result[1], lane))


@st.composite
def quant_cases(draw: st.DrawFn, lane: Lane) -> KernelCase:
    """:func:`flashrec.kernels.quantize.quant_per_token`: same input, so the same codes and the same scale."""
    return _row_case(draw, lane, 1, _quantised(lane))


def quant_case(x: torch.Tensor, lane: Lane) -> KernelCase:
    """The quantisation of given rows."""
    return KernelCase(f"{x.shape[0]} x {x.shape[1]}", (Argument(x),), (exact(x),), _quantised(lane), {})


def _quantised(lane: Lane) -> Collect:
    apart = 0.0 if lane.compiled else CODES_APART

    def outputs(result: Any, _: Sequence[Any]) -> list[Output]:
        codes = Output("codes", result[0], Rule.CODES, apart, lane.code_steps)
        return [codes, Output("scale", result[1], Rule.BITWISE)]

    return outputs


def random_fp8(data: Draws, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [*, size] and scales [rows, 1] of normal rows."""
    from flashrec.kernels.quantize import quant_per_token

    return quant_per_token(data.normal(*shape, dtype=torch.float32))
