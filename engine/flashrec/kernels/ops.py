"""Which implementation of each kernel an engine runs: decided once, at construction, and said why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from flashrec.errors import ConfigError
from flashrec.kernels._triton import MODE, TritonMode
from flashrec.kernels.agreement import first_difference, gluon_difference, prefill_difference
from flashrec.kernels.gemm import linear_triton
from flashrec.kernels.gemm_plan import is_small
from flashrec.kernels.linear import configure_cublas, linear_cublas
from flashrec.kernels.prefill_attention_gluon import is_tall, unfit
from flashrec.kernels.registry import CUBLAS, GLUON, REGISTRY, SCALED_MM, TRITON, Kernel
from flashrec.kernels.tiles import AttentionShape, RowTiles

TORCH = "torch"
UNUSED = "unused"
BY_HEIGHT = f"{TRITON}; {GLUON} for long contexts"
FP8_OPERATIONS = (
    "add_rms_norm_quant",
    "silu_mul_quant",
    "quant_per_token",
    "linear_fp8",
    "shared_prefix_attention_quant",
)


@dataclass(frozen=True, slots=True)
class Choice:
    """The implementation taken for one operation, and the reason."""

    implementation: str
    reason: str


@dataclass(frozen=True, slots=True)
class Ops:
    """The chosen callables, each with its reference's signature, and :attr:`choices` by their names."""

    rms_norm: Kernel
    add_rms_norm: Kernel
    add_rms_norm_quant: Kernel
    silu_mul: Kernel
    silu_mul_quant: Kernel
    quant_per_token: Kernel
    qk_norm_rope_store: Kernel
    linear: Kernel
    linear_fp8: Kernel
    shared_prefix_attention: Kernel
    shared_prefix_attention_quant: Kernel
    paged_prefill_attention: Kernel
    trie_expand: Kernel
    choices: Mapping[str, Choice]
    tall_tiles: bool = False
    """Whether prefill attention takes tiles of ``TALL_TILE_M`` matrix rows beside those of ``TILE_M``."""

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
    weights: Sequence[tuple[int, int]] = ((2048, 2048), (2048, 6144)),
    attention: AttentionShape | None = None,
    enable_fused_rms_fp8: bool = True,
    enable_fused_silu_fp8: bool = True,
    enable_fused_qk_rope_kv: bool = True,
) -> Ops:
    """Chooses every operation's implementation for a device, an activation dtype and the switches (SPEC M7).

    ``weights`` are (outputs, inputs) of the model's projections: on a GPU two products share each where they give
    the same bits; two prefill kernels share ``attention`` in the same way (``None``: one serves all). The layers leave
    a fused operation alone when its switch is off; here that is only recorded. Raises :class:`ConfigError` on a GPU
    where Triton is missing and ``kernels`` does not ask for PyTorch.
    """
    if device.type != "cuda":
        callables, choices = _references(f"device {device.type} runs the plain PyTorch references")
    elif kernels == "torch":
        configure_cublas()
        callables, choices = _references("kernels=torch was asked for")
    elif MODE is TritonMode.DEVICE:
        callables, choices = _device_kernels(device, dtype, weights, quantization, attention)
    else:
        raise ConfigError(f"kernels: Triton is {MODE.value} here; install flashrec[gpu], or ask for kernels=torch")
    plain_rope = kernels == "torch" and not enable_fused_qk_rope_kv
    off = {
        "enable_fused_rms_fp8 is off": () if enable_fused_rms_fp8 else ("add_rms_norm_quant",),
        "enable_fused_silu_fp8 is off": () if enable_fused_silu_fp8 else ("silu_mul_quant",),
        "enable_fused_qk_rope_kv is off": ("qk_norm_rope_store",) if plain_rope else (),
        "the model is not FP8": () if quantization == "fp8" else FP8_OPERATIONS,
    }
    if not enable_fused_qk_rope_kv:
        taken = choices["qk_norm_rope_store"].implementation
        choices["qk_norm_rope_store"] = Choice(f"{taken}, norms apart", "enable_fused_qk_rope_kv is off")
    unused = {name: Choice(UNUSED, reason) for reason, names in off.items() for name in names}
    tall = choices["paged_prefill_attention"].implementation == BY_HEIGHT
    return Ops(**callables, choices=choices | unused, tall_tiles=tall)


def _references(reason: str) -> tuple[dict[str, Kernel], dict[str, Choice]]:
    callables = {name: spec.reference for name, spec in REGISTRY.items()}
    return callables, {name: Choice(TORCH, reason) for name in callables}


def _device_kernels(
    device: torch.device,
    dtype: torch.dtype,
    weights: Sequence[tuple[int, int]],
    quantization: str,
    attention: AttentionShape | None,
) -> tuple[dict[str, Kernel], dict[str, Choice]]:
    choices = {name: Choice(TRITON, "a GPU with Triton") for name in REGISTRY}
    if dtype == torch.float32:
        no_kernel = Choice(TORCH, "float32 attention does not fit a multiprocessor's registers")
        choices |= {name: no_kernel for name in REGISTRY if "attention" in name}
        choices["linear_fp8"] = Choice(TORCH, "FP8 matrix units add in about 14 bits, too few for a float32 result")
    callables = {name: _implementation(name, choices[name].implementation) for name in REGISTRY}
    if dtype == torch.bfloat16:
        configure_cublas()
        callables["linear"], choices["linear"] = _bf16_product(device, weights)
        if quantization == "fp8":
            callables["linear_fp8"], choices["linear_fp8"] = _fp8_product(device, weights)
        if attention is not None:
            name = "paged_prefill_attention"
            callables[name], choices[name] = _prefill_attention(device, attention)
    return callables, choices


def _implementation(operation: str, name: str) -> Kernel:
    spec = REGISTRY[operation]
    return spec.reference if name == TORCH else spec.implementations[name]


def _for_small(name: str, other: str) -> str:
    return f"{name} for small products, else {other}"


def _fp8_product(device: torch.device, weights: Sequence[tuple[int, int]]) -> tuple[Kernel, Choice]:
    """A product of ours for small ones, on a Hopper Gluon's, and ``torch._scaled_mm`` for large, where they agree to
    the bit; else the latter. Sizes that ``_scaled_mm`` does not take are Triton's alone.
    """
    kernels = REGISTRY["linear_fp8"].implementations
    odd = next((weight for weight in weights if weight[0] % 16 or weight[1] % 16), None)
    if odd is not None:
        return kernels[TRITON], Choice(TRITON, f"{SCALED_MM} takes multiples of 16, not a {list(odd)} weight")
    large, otherwise = kernels[SCALED_MM], ""
    if is_hopper(device):
        why_not = gluon_difference(kernels[GLUON], large, weights, device)
        if why_not is None:
            return by_size(kernels[GLUON], large), Choice(_for_small(GLUON, SCALED_MM), _TRIED)
        otherwise = f"; {GLUON} not: {why_not}"
    different = first_difference(kernels[TRITON], large, weights, device, fp8=True)
    if different is not None:
        return large, Choice(SCALED_MM, f"{TRITON} gives other bits on this device: {different}{otherwise}")
    return by_size(kernels[TRITON], large), Choice(_for_small(TRITON, SCALED_MM), f"{_TRIED}{otherwise}")


_TRIED = "the same bits for every weight of the model, tried"


def is_hopper(device: torch.device) -> bool:
    """Whether Gluon's kernels are for a GPU."""
    return torch.cuda.get_device_capability(device) == (9, 0)


def by_size(small: Kernel, large: Kernel) -> Kernel:
    """:func:`flashrec.kernels.linear.linear_fp8` by the faster of two products that give the same bits."""

    def linear_fp8(
        x_fp8: torch.Tensor,
        x_scale: torch.Tensor,
        w_fp8: torch.Tensor,
        w_scale: torch.Tensor,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        kernel = small if is_small(x_fp8.shape[0], w_fp8.shape[0]) else large
        out: torch.Tensor = kernel(x_fp8, x_scale, w_fp8, w_scale, out_dtype)
        return out

    return linear_fp8


LONG_K = 4096
"""Above it cuBLASLt without split-K has no good kernel for few bf16 rows. H200, torch 2.11, 2026-11-29, cuBLASLt /
Triton in us: [24,576, 2,048] at M = 50: 28 / 31, at 400: 58 / 86; [2,048, 6,144] at M = 50: 145 / 15."""


def _bf16_product(device: torch.device, weights: Sequence[tuple[int, int]]) -> tuple[Kernel, Choice]:
    """cuBLASLt; above :data:`LONG_K` Triton for small products, and for all where the two differ in a bit.

    They share the ``weights`` that they were tried on, and no others: the head is one product's, whatever the rows.
    """
    long = [weight for weight in weights if weight[1] > LONG_K]
    different = first_difference(linear_triton, linear_cublas, long, device, fp8=False)

    def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        shared = tuple(w.shape) in long and is_small(x.shape[0], w.shape[0])
        ours = w.shape[1] > LONG_K and (different is not None or shared)
        return (linear_triton if ours else linear_cublas)(x, w)

    said = _for_small(TRITON, CUBLAS) if different is None else TRITON
    reason = "split-K off" if different is None else f"split-K off; the two differ: {different}"
    return linear, Choice(f"{CUBLAS}; above K = {LONG_K} {said}", reason)


def _prefill_attention(device: torch.device, shape: AttentionShape) -> tuple[Kernel, Choice]:
    """Triton's kernel, and on a Hopper the one for long contexts beside it, where they agree to the bit."""
    kernels = REGISTRY["paged_prefill_attention"].implementations
    why_not = unfit(shape)
    if not is_hopper(device):
        why_not = "this GPU is no Hopper"
    if not why_not:
        why_not = prefill_difference(kernels[GLUON], kernels[TRITON], shape, device) or ""
    if why_not:
        return kernels[TRITON], Choice(TRITON, f"{GLUON} not for long contexts: {why_not}")
    return by_tile_height(kernels[GLUON], kernels[TRITON]), Choice(BY_HEIGHT, "the same bits on prompts tried")


def by_tile_height(tall: Kernel, short: Kernel) -> Kernel:
    """Prefill attention by the kernel that its tiles were cut for."""

    def paged_prefill_attention(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        page_table: torch.Tensor,
        page_size: int,
        kv_len: torch.Tensor,
        positions: torch.Tensor,
        tiles: RowTiles,
        tile_rows: int,
        *scales: float,
    ) -> torch.Tensor:
        shape = AttentionShape(q.shape[1], k_cache.shape[1], q.shape[2], page_size, k_cache.dtype)
        kernel = tall if is_tall(shape, tile_rows) else short
        out: torch.Tensor = kernel(
            q, k_cache, v_cache, page_table, page_size, kv_len, positions, tiles, tile_rows, *scales
        )
        return out

    return paged_prefill_attention
