"""Faults of single kernels. An implementation is replaced in the registry, so that suite and engine get the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from flashrec.kernels.registry import REGISTRY, Kernel
from flashrec_harness.faults.registry import fault, kernel

_BLOCK = 64


@contextmanager
def _wrong(name: str, spoil: Callable[[Kernel], Kernel]) -> Iterator[None]:
    """Every implementation of the kernel ``name``, spoilt; its reference stays right."""
    spec = REGISTRY[name]
    spoilt = {one: spoil(implementation) for one, implementation in spec.implementations.items()}
    with mock.patch.dict(REGISTRY, {name: replace(spec, implementations=spoilt)}):
        yield


@fault("wrong-last-block", kernel("silu_mul"))
def wrong_last_block() -> Iterator[None]:
    """The gated activation is 1 % too large in the last, partial block of 64 columns, and right elsewhere."""

    def spoil(right: Kernel) -> Kernel:
        def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = right(gate_up)
            out[:, out.shape[1] // _BLOCK * _BLOCK :] *= 1.01
            return out

        return silu_mul

    with _wrong("silu_mul", spoil):
        yield


@fault("zeros-kernel", kernel("rms_norm"))
def zeros_kernel() -> Iterator[None]:
    """RMSNorm returns zeros of the right shape."""

    def spoil(right: Kernel) -> Kernel:
        return lambda *arguments: torch.zeros_like(right(*arguments))

    with _wrong("rms_norm", spoil):
        yield


@fault("scale-dropped", kernel("quant_per_token"))
def scale_dropped() -> Iterator[None]:
    """FP8 quantisation returns its codes with a scale of 1.0 for every token."""

    def spoil(right: Kernel) -> Kernel:
        def quant_per_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            codes, scale = right(x)
            return codes, torch.ones_like(scale)

        return quant_per_token

    with _wrong("quant_per_token", spoil):
        yield


@fault("weight-scale-dropped", kernel("linear_fp8"))
def weight_scale_dropped() -> Iterator[None]:
    """FP8 products take 1.0 for the scale of every weight row."""

    def spoil(right: Kernel) -> Kernel:
        def linear_fp8(x: torch.Tensor, scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, *rest: Any) -> Any:
            return right(x, scale, w, torch.ones_like(w_scale), *rest)

        return linear_fp8

    with _wrong("linear_fp8", spoil):
        yield
