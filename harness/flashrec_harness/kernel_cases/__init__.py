"""Inputs for every registered kernel: a hypothesis strategy of :class:`KernelCase` by kernel name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hypothesis import strategies as st

from flashrec_harness.kernel_cases.attention import decode_cases, decode_quant_cases, prefill_cases
from flashrec_harness.kernel_cases.base import KernelCase, Lane
from flashrec_harness.kernel_cases.examples import EXAMPLES
from flashrec_harness.kernel_cases.pointwise import (
    add_rms_norm_cases,
    add_rms_norm_quant_cases,
    quant_cases,
    rms_norm_cases,
    silu_mul_cases,
    silu_mul_quant_cases,
)
from flashrec_harness.kernel_cases.products import linear_cases, linear_fp8_cases
from flashrec_harness.kernel_cases.rotary import qk_norm_rope_store_cases
from flashrec_harness.kernel_cases.trie import trie_expand_cases

CaseStrategy = Callable[[Lane], st.SearchStrategy[KernelCase]]

CASES: Mapping[str, CaseStrategy] = {
    "rms_norm": rms_norm_cases,
    "add_rms_norm": add_rms_norm_cases,
    "add_rms_norm_quant": add_rms_norm_quant_cases,
    "silu_mul": silu_mul_cases,
    "silu_mul_quant": silu_mul_quant_cases,
    "quant_per_token": quant_cases,
    "qk_norm_rope_store": qk_norm_rope_store_cases,
    "linear": linear_cases,
    "linear_fp8": linear_fp8_cases,
    "shared_prefix_attention": decode_cases,
    "shared_prefix_attention_quant": decode_quant_cases,
    "paged_prefill_attention": prefill_cases,
    "trie_expand": trie_expand_cases,
}

__all__ = ["CASES", "EXAMPLES", "CaseStrategy", "KernelCase", "Lane"]
