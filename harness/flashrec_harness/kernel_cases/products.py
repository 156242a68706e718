"""Cases of the matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from flashrec.kernels.registry import CUBLAS, GLUON, SCALED_MM, TRITON
from flashrec_harness.kernel_cases.base import (
    NO_GLUON,
    Argument,
    Draws,
    KernelCase,
    Lane,
    Output,
    draws,
    exact,
    has_gluon,
    layouts,
)
from flashrec_harness.kernel_cases.pointwise import random_fp8

_CPU_ROWS = (0, 1, 2, 15, 16, 17, 33, 64, 65)
_GPU_ROWS = (0, 1, 7, 16, 17, 50, 64, 65, 129, 400, 1601)
_CPU_OUTS, _CPU_SIZES = (1, 5, 63, 64, 65, 130), (1, 7, 31, 32, 33, 64, 100, 257)
_GPU_WEIGHTS = ((2048, 2048), (2048, 6144), (192, 272), (100, 1000))


def _one(result: Any, _: Sequence[Any]) -> list[Output]:
    return [Output("out", result)]


def _shape(draw: st.DrawFn, lane: Lane) -> tuple[int, int, int]:
    if lane.compiled:
        return draw(st.sampled_from(_GPU_ROWS)), *draw(st.sampled_from(_GPU_WEIGHTS))
    sizes = (_CPU_ROWS, _CPU_OUTS, _CPU_SIZES)
    rows, outs, size = (draw(st.sampled_from(choices)) for choices in sizes)
    return rows, outs, size


def _unfit(lane: Lane, name: str, aligned: bool) -> dict[str, str]:
    if not lane.compiled:
        return {name: "needs a GPU"}
    return {} if aligned else {name: "takes contiguous operands with sizes of multiples of 16"}


_UNALIGNED = "takes rows that begin at multiples of 16 bytes"


def _unfit_fp8(lane: Lane, outs: int, size: int, offset: int) -> dict[str, str]:
    if lane.compiled and lane.dtype == torch.float32:
        reason = "FP8 matrix units add in about 14 bits, too few for a float32 result"
        return dict.fromkeys((TRITON, GLUON, SCALED_MM), reason)
    unfit = _unfit(lane, SCALED_MM, outs % 16 == 0 and size % 16 == 0)
    if not has_gluon(lane):
        return unfit | {GLUON: NO_GLUON}
    return unfit if size % 16 == 0 and offset % 16 == 0 else unfit | {GLUON: _UNALIGNED}


@st.composite
def linear_cases(draw: st.DrawFn, lane: Lane) -> KernelCase:
    """:func:`flashrec.kernels.linear.linear`."""
    rows, outs, size = _shape(draw, lane)
    data, (pad, offset) = draw(draws(lane)), draw(layouts(lane))
    x, w = data.normal(rows, size), data.normal(outs, size, scale=size**-0.5)
    unfit = _unfit(lane, CUBLAS, lane.dtype == torch.bfloat16)
    return KernelCase(
        f"M {rows}, N {outs}, K {size}, pad {pad}, offset {offset}",
        (Argument(x, pad, offset), Argument(w)),
        (exact(x), exact(w)),
        _one,
        unfit,
    )


@st.composite
def linear_fp8_cases(draw: st.DrawFn, lane: Lane) -> KernelCase:
    """:func:`flashrec.kernels.linear.linear_fp8`; exact: the float64 product of the dequantised operands."""
    shape = _shape(draw, lane)
    return fp8_product(draw(draws(lane)), *shape)


def fp8_product(data: Draws, rows: int, outs: int, size: int, *, offset: int = 0) -> KernelCase:
    """One FP8 product; its token operands begin ``offset`` elements after an aligned address."""
    lane = data.lane
    x, x_scale = random_fp8(data, rows, size)
    w, w_scale = random_fp8(data, outs, size)
    w_scale = w_scale.squeeze(-1) * size**-0.5
    return KernelCase(
        f"M {rows}, N {outs}, K {size}, offset {offset}",
        (Argument(x, 0, offset), Argument(x_scale, 0, offset), Argument(w), Argument(w_scale), lane.dtype),
        (exact(x), exact(x_scale), exact(w), exact(w_scale), torch.float64),
        _one,
        _unfit_fp8(lane, outs, size, offset),
    )
