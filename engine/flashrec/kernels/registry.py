"""Every device kernel with its plain PyTorch reference: what the ``kernel`` suite walks and layers run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from flashrec.kernels import (
    decode_attention,
    decode_attention_triton,
    gemm,
    gemm_gluon,
    linear,
    prefill_attention,
    prefill_attention_gluon,
    qk_norm_rope_store,
    quantize,
    rms_norm,
    silu_mul,
    trie_expand,
    trie_expand_triton,
)

Kernel = Callable[..., Any]


class Tolerance(StrEnum):
    """How an implementation is compared with its reference."""

    MEASURED = "measured"
    """Floats: within twice the error that the reference itself makes in the kernel's precision."""
    CODES = "codes"
    """FP8 codes: equal, or one code apart and counted; scales as floats."""
    BITWISE = "bitwise"
    """Data movement and integers: equal."""


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One operation: its reference and the implementations that may stand in for it, by name."""

    name: str
    doc: str
    tolerance: Tolerance
    reference: Kernel
    implementations: Mapping[str, Kernel]


TRITON = "triton"
GLUON = "gluon"
CUBLAS = "cublaslt"
SCALED_MM = "torch._scaled_mm"


def _spec(reference: Kernel, tolerance: Tolerance, implementations: Mapping[str, Kernel]) -> KernelSpec:
    doc = (reference.__doc__ or "").strip().splitlines()[0]
    return KernelSpec(reference.__name__, doc, tolerance, reference, implementations)


_SPECS = (
    _spec(rms_norm.rms_norm, Tolerance.MEASURED, {TRITON: rms_norm.rms_norm_triton}),
    _spec(rms_norm.add_rms_norm, Tolerance.MEASURED, {TRITON: rms_norm.add_rms_norm_triton}),
    _spec(rms_norm.add_rms_norm_quant, Tolerance.CODES, {TRITON: rms_norm.add_rms_norm_quant_triton}),
    _spec(silu_mul.silu_mul, Tolerance.MEASURED, {TRITON: silu_mul.silu_mul_triton}),
    _spec(silu_mul.silu_mul_quant, Tolerance.CODES, {TRITON: silu_mul.silu_mul_quant_triton}),
    _spec(quantize.quant_per_token, Tolerance.CODES, {TRITON: quantize.quant_per_token_triton}),
    _spec(
        qk_norm_rope_store.qk_norm_rope_store,
        Tolerance.MEASURED,
        {TRITON: qk_norm_rope_store.qk_norm_rope_store_triton},
    ),
    _spec(linear.linear, Tolerance.MEASURED, {TRITON: gemm.linear_triton, CUBLAS: linear.linear_cublas}),
    _spec(
        linear.linear_fp8,
        Tolerance.MEASURED,
        {
            TRITON: gemm.linear_fp8_triton,
            GLUON: gemm_gluon.linear_fp8_gluon,
            SCALED_MM: linear.linear_fp8_scaled_mm,
        },
    ),
    _spec(
        decode_attention.shared_prefix_attention,
        Tolerance.MEASURED,
        {TRITON: decode_attention_triton.shared_prefix_attention_triton},
    ),
    _spec(
        decode_attention.shared_prefix_attention_quant,
        Tolerance.CODES,
        {TRITON: decode_attention_triton.shared_prefix_attention_quant_triton},
    ),
    _spec(
        prefill_attention.paged_prefill_attention,
        Tolerance.MEASURED,
        {
            TRITON: prefill_attention.paged_prefill_attention_triton,
            GLUON: prefill_attention_gluon.paged_prefill_attention_gluon,
        },
    ),
    _spec(trie_expand.trie_expand, Tolerance.MEASURED, {TRITON: trie_expand_triton.trie_expand_triton}),
)
REGISTRY: Mapping[str, KernelSpec] = {spec.name: spec for spec in _SPECS}
