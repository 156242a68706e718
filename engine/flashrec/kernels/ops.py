"""Which implementation of each kernel an engine runs: decided once, at construction, and said why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from flashrec.errors import ConfigError
from flashrec.kernels._triton import MODE, TritonMode
from flashrec.kernels.gemm_plan import SPLIT_SIZE
from flashrec.kernels.linear import configure_cublas, linear_cublas
from flashrec.kernels.registry import CUBLAS, REGISTRY, SCALED_MM, TRITON, Kernel
from flashrec.kernels.split_gemm import SplitGemm

TORCH = "torch"
UNUSED = "unused"
FP8_OPERATIONS = (
    "add_rms_norm_quant",
    "silu_mul_quant",
    "quant_per_token",
    "linear_fp8",
    "linear_fp8_decode",
    "shared_prefix_attention_quant",
)


@dataclass(frozen=True, slots=True)
class Choice:
    """The implementation taken for one operation, and the reason."""

    implementation: str
    reason: str


@dataclass(frozen=True, slots=True)
class Ops:
    """The chosen callables, each with its reference's signature, and :attr:`choices` by their names.

    ``linear`` and ``linear_fp8`` serve prefill; ``linear_decode`` and ``linear_fp8_decode`` serve every
    decode bucket, so that a beam row has the same bits in all of them. One object belongs to one stream: its
    decode products share a workspace.
    """

    rms_norm: Kernel
    add_rms_norm: Kernel
    add_rms_norm_quant: Kernel
    silu_mul: Kernel
    silu_mul_quant: Kernel
    quant_per_token: Kernel
    qk_norm_rope_store: Kernel
    linear: Kernel
    linear_decode: Kernel
    linear_fp8: Kernel
    linear_fp8_decode: Kernel
    shared_prefix_attention: Kernel
    shared_prefix_attention_quant: Kernel
    paged_prefill_attention: Kernel
    trie_expand: Kernel
    choices: Mapping[str, Choice]

    @property
    def chosen(self) -> dict[str, str]:
        """Implementation by operation, for ``/server_info``."""
        return {name: choice.implementation for name, choice in self.choices.items()}


def select_ops(
    device: torch.device,
    dtype: torch.dtype,
    quantization: Literal["none", "fp8"] = "none",
    *,
    kernels: Literal["auto", "torch"] = "auto",
    enable_fused_rms_fp8: bool = True,
    enable_fused_silu_fp8: bool = True,
    enable_fused_qk_rope_kv: bool = True,
) -> Ops:
    """Chooses every operation's implementation for a device, an activation dtype and the switches (SPEC M7).

    The layers leave a fused operation alone when its switch is off; here that is only recorded. Raises
    :class:`ConfigError` on a GPU where Triton is missing and ``kernels`` does not ask for PyTorch.
    """
    if device.type != "cuda":
        callables, choices = _references(f"device {device.type} runs the plain PyTorch references")
    elif kernels == "torch":
        configure_cublas()
        callables, choices = _references("kernels=torch was asked for")
    elif MODE is TritonMode.DEVICE:
        callables, choices = _device_kernels(device, dtype)
    else:
        raise ConfigError(f"kernels: Triton is {MODE.value} here; install flashrec[gpu], or ask for kernels=torch")
    off = {
        "enable_fused_rms_fp8 is off": () if enable_fused_rms_fp8 else ("add_rms_norm_quant",),
        "enable_fused_silu_fp8 is off": () if enable_fused_silu_fp8 else ("silu_mul_quant",),
        "enable_fused_qk_rope_kv is off": () if enable_fused_qk_rope_kv else ("qk_norm_rope_store",),
        "the model is not FP8": () if quantization == "fp8" else FP8_OPERATIONS,
    }
    unused = {name: Choice(UNUSED, reason) for reason, names in off.items() for name in names}
    return Ops(**callables, choices=choices | unused)


def _references(reason: str) -> tuple[dict[str, Kernel], dict[str, Choice]]:
    callables = {name: spec.reference for name, spec in REGISTRY.items()}
    callables |= {"linear_decode": callables["linear"], "linear_fp8_decode": callables["linear_fp8"]}
    return callables, {name: Choice(TORCH, reason) for name in callables}


def _device_kernels(device: torch.device, dtype: torch.dtype) -> tuple[dict[str, Kernel], dict[str, Choice]]:
    choices = {name: Choice(TRITON, "a GPU with Triton") for name in REGISTRY}
    if dtype == torch.bfloat16:
        configure_cublas()
        choices["linear"] = Choice(CUBLAS, "many rows; split-K off")
        choices["linear_fp8"] = Choice(SCALED_MM, "many rows")
    if dtype == torch.float32:
        no_kernel = Choice(TORCH, "float32 attention does not fit a multiprocessor's registers")
        choices |= {name: no_kernel for name in REGISTRY if "attention" in name}
    callables = {name: _implementation(name, choices[name].implementation) for name in REGISTRY}
    products = SplitGemm(device)
    few = "few rows, and the same bits at every number of rows"
    choices |= {"linear_decode": Choice(TRITON, few), "linear_fp8_decode": Choice(TRITON, few)}
    callables |= {"linear_decode": products.linear, "linear_fp8_decode": products.linear_fp8}
    if dtype == torch.bfloat16:
        choices["linear_decode"] = Choice(f"{CUBLAS}, {TRITON} above K = {SPLIT_SIZE}", few)
        callables["linear_decode"] = _bf16_decode_product(products)
    return callables, choices


def _implementation(operation: str, name: str) -> Kernel:
    spec = REGISTRY[operation]
    return spec.reference if name == TORCH else spec.implementations[name]


def _bf16_decode_product(products: SplitGemm) -> Kernel:
    """cuBLASLt for a short K, ours for a long one, where cuBLASLt without split-K has no kernel for few rows.

    H200, torch 2.11, 2026-11-29, cuBLASLt / Triton in us: [24,576, 2,048] at M = 50: 28 / 31, at 400: 58 / 86;
    [2,048, 6,144] at M = 50: 145 / 15.
    """

    def linear_decode(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return linear_cublas(x, w) if w.shape[1] <= SPLIT_SIZE else products.linear(x, w)

    return linear_decode
