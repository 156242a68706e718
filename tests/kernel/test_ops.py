"""Which kernels an engine runs is decided at construction and said, with its reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from flashrec.errors import ConfigError
from flashrec.kernels import agreement, ops
from flashrec.kernels._triton import TritonMode
from flashrec.kernels.agreement import first_difference
from flashrec.kernels.gemm_plan import is_small
from flashrec.kernels.linear import linear_fp8
from flashrec.kernels.prefill_attention import paged_prefill_attention
from flashrec.kernels.quantize import quant_per_token
from flashrec.kernels.registry import REGISTRY
from flashrec.kernels.tiles import AttentionShape, row_tiles

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_a_cpu_runs_the_references_and_says_so() -> None:
    chosen = ops.select_ops(CPU, torch.float32, "fp8")
    assert set(chosen.chosen.values()) == {"torch"}
    assert chosen.rms_norm is REGISTRY["rms_norm"].reference
    assert all(choice.reason for choice in chosen.choices.values())


def test_every_registered_operation_is_in_ops() -> None:
    chosen = ops.select_ops(CPU, torch.float32, "fp8")
    assert set(REGISTRY) <= set(chosen.chosen)
    assert all(callable(getattr(chosen, name)) for name in chosen.chosen)


@pytest.mark.parametrize(
    ("switch", "operation"),
    [
        ("enable_fused_rms_fp8", "add_rms_norm_quant"),
        ("enable_fused_silu_fp8", "silu_mul_quant"),
    ],
)
def test_a_switch_that_is_off_is_listed(switch: str, operation: str) -> None:
    switches: dict[str, Any] = {switch: False}
    chosen = ops.select_ops(CPU, torch.float32, "fp8", **switches)
    assert chosen.choices[operation] == ops.Choice(ops.UNUSED, f"{switch} is off")
    others = {name for name, value in chosen.chosen.items() if value == ops.UNUSED}
    assert others == {operation}


def test_without_its_fusion_rope_runs_with_the_norms_apart_or_plain() -> None:
    """The rungs of SPEC M7; the layers take the same one, see the tests of loading."""
    apart = ops.select_ops(CPU, torch.float32, "fp8", enable_fused_qk_rope_kv=False)
    assert apart.chosen["qk_norm_rope_store"] == "torch, norms apart"
    plain = ops.select_ops(CPU, torch.float32, "fp8", kernels="torch", enable_fused_qk_rope_kv=False)
    assert plain.choices["qk_norm_rope_store"] == ops.Choice(ops.UNUSED, "enable_fused_qk_rope_kv is off")


def test_an_unquantised_model_uses_no_fp8_operation() -> None:
    chosen = ops.select_ops(CPU, torch.float32)
    assert {name for name, value in chosen.chosen.items() if value == ops.UNUSED} == set(ops.FP8_OPERATIONS)


def test_a_gpu_without_triton_is_an_error_and_never_a_silent_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "MODE", TritonMode.ABSENT)
    with pytest.raises(ConfigError, match="install flashrec"):
        ops.select_ops(CUDA, torch.bfloat16)
    monkeypatch.setattr(ops, "configure_cublas", lambda: None)
    assert set(ops.select_ops(CUDA, torch.bfloat16, "fp8", kernels="torch").chosen.values()) == {"torch"}


@pytest.mark.gpu
def test_a_gpu_runs_triton_and_libraries() -> None:
    chosen = ops.select_ops(CUDA, torch.bfloat16, "fp8").chosen
    assert chosen["add_rms_norm_quant"] == "triton"
    hopper = torch.cuda.get_device_capability() == (9, 0)
    ours = "gluon" if hopper else "triton"
    assert chosen["linear_fp8"] == f"{ours} for small products, else torch._scaled_mm"


def test_the_size_picks_the_product() -> None:
    product = ops.by_size(lambda *_: "small", lambda *_: "large")
    for rows, outs, small in ((1, 12288, True), (384, 12288, True), (385, 12288, False), (512, 2048, True)):
        assert is_small(rows, outs) is small
        operands = torch.empty(rows, 8, device="meta"), torch.empty(rows), torch.empty(outs, 8, device="meta")
        assert product(*operands, torch.empty(outs), torch.bfloat16) == ("small" if small else "large")


WEIGHTS = [(32, 64), (16, 48)]


def test_products_that_differ_in_a_bit_are_found() -> None:
    """A product that adds in another order is found, at its row count and weight."""
    assert first_difference(linear_fp8, linear_fp8, WEIGHTS, CPU, fp8=True) is None
    found = first_difference(linear_fp8, _off_by_a_bit, WEIGHTS, CPU, fp8=True)
    assert found == "1 rows of a [16, 48] weight"


def _choose_fp8(gluon: Any, triton: Any) -> ops.Choice:
    """Beside the reference as the library's product; the chosen one computes as the library does."""
    spec = REGISTRY["linear_fp8"]
    kernels = {"triton": triton, "gluon": gluon, "torch._scaled_mm": linear_fp8}
    with mock.patch.dict(REGISTRY, {spec.name: replace(spec, implementations=kernels)}):
        kernel, choice = ops._fp8_product(CPU, WEIGHTS)
    codes, scale = quant_per_token(torch.eye(16, 48, dtype=torch.bfloat16))
    operands = codes, scale, codes, torch.ones(16), torch.bfloat16
    assert torch.equal(kernel(*operands), linear_fp8(*operands))
    return choice


def test_small_products_are_of_the_first_kernel_of_ours_that_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a Hopper Gluon's; where it gives another bit or does not compile, Triton's; else the library's alone."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    tried = "the same bits for every weight of the model, tried"
    assert _choose_fp8(linear_fp8, no_kernel) == ops.Choice("gluon for small products, else torch._scaled_mm", tried)
    choice = _choose_fp8(_off_by_a_bit, linear_fp8)
    assert choice.implementation == "triton for small products, else torch._scaled_mm"
    assert choice.reason == f"{tried}; gluon not: other bits for 1 rows of a [16, 48] weight"
    choice = _choose_fp8(no_kernel, _off_by_a_bit)
    assert choice.implementation == "torch._scaled_mm"
    assert "triton gives other bits on this device: 1 rows of a [16, 48]" in choice.reason
    assert "gluon not: it does not run here (RuntimeError: unknown layout)" in choice.reason
    with pytest.raises(RuntimeError, match="unknown"):
        _choose_fp8(_off_by_a_bit, no_kernel)


def test_gluon_is_not_asked_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    choice = _choose_fp8(no_kernel, linear_fp8)
    assert choice.implementation == "triton for small products, else torch._scaled_mm"
    assert "gluon" not in choice.reason


def no_kernel(*_: Any) -> torch.Tensor:
    raise RuntimeError("unknown\n  layout")


def test_a_weight_of_an_odd_size_leaves_scaled_mm_out() -> None:
    kernel, choice = ops._fp8_product(CPU, [(32, 64), (100, 64)])
    assert kernel is REGISTRY["linear_fp8"].implementations["triton"]
    assert choice.implementation == "triton"
    assert "[100, 64]" in choice.reason


def _off_by_a_bit(*operands: Any) -> torch.Tensor:
    return torch.nextafter(linear_fp8(*operands), torch.tensor(torch.inf, dtype=torch.bfloat16))


def test_tall_tiles_are_the_gluon_kernels_and_short_ones_tritons() -> None:
    kernel = ops.by_tile_height(lambda *_: "tall", lambda *_: "short")
    for heads, kv_heads, rows, taken in (
        (16, 8, 64, "tall"),
        (16, 8, 32, "short"),
        (8, 8, 128, "tall"),
        (32, 4, 16, "tall"),
        (6, 1, 16, "short"),
    ):
        q, cache = torch.empty(4, heads, 128), torch.empty(128, kv_heads, 128, dtype=torch.bfloat16)
        none = torch.empty(0)
        assert kernel(q, cache, cache, none, 64, none, none, row_tiles([4], rows), rows, 1.0, 1.0, 1.0) == taken


SHAPE = AttentionShape(16, 8, 128, 64, torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kv_dtype": torch.float8_e4m3fn}, "float8_e4m3fn"),
        ({"head_dim": 64}, "heads of 64"),
        ({"page_size": 16}, "pages of 16"),
        ({"q_heads": 48}, "48 query heads on 8"),
    ],
)
def test_a_pool_that_the_gluon_kernel_cannot_read_leaves_it_out(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], reason: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    kernel, choice = ops._prefill_attention(CPU, replace(SHAPE, **change))
    assert kernel is REGISTRY["paged_prefill_attention"].implementations["triton"]
    assert choice.implementation == "triton"
    assert reason in choice.reason


def test_prefill_kernels_that_differ_in_a_bit_are_not_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tall kernel's stand-in errs in one row of a prompt with a cached prefix; a refusal to compile is said too."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(agreement, "PROMPTS", ((0, 70), (64, 131), (0, 1)))
    small = replace(SHAPE, q_heads=2, kv_heads=1)
    spec = REGISTRY["paged_prefill_attention"]

    def choose(tall: Any) -> tuple[Any, ops.Choice]:
        kernels = {"triton": paged_prefill_attention, "gluon": tall}
        with mock.patch.dict(REGISTRY, {spec.name: replace(spec, implementations=kernels)}):
            return ops._prefill_attention(CPU, small)

    kernel, choice = choose(lambda *operands: paged_prefill_attention(*operands))
    assert kernel is not paged_prefill_attention
    assert choice.implementation == ops.BY_HEIGHT == "triton; gluon for long contexts"

    def off_in_row_100(*operands: Any) -> torch.Tensor:
        out = paged_prefill_attention(*operands)
        out[100, 1, 3] = torch.nextafter(out[100, 1, 3], torch.tensor(torch.inf, dtype=out.dtype))
        return out

    kernel, choice = choose(off_in_row_100)
    assert kernel is paged_prefill_attention
    assert choice.reason == "gluon not for long contexts: row 100 of 138"

    assert "does not run here (RuntimeError: unknown layout)" in choose(no_kernel)[1].reason

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert "no Hopper" in ops._prefill_attention(CPU, small)[1].reason


@pytest.mark.gpu
def test_a_hopper_takes_tall_tiles() -> None:
    chosen = ops.select_ops(CUDA, torch.bfloat16, attention=SHAPE)
    hopper = torch.cuda.get_device_capability() == (9, 0)
    assert chosen.tall_tiles is hopper, chosen.choices["paged_prefill_attention"].reason
