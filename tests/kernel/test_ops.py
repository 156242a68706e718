"""Which kernels an engine runs is decided at construction and said, with its reason."""

from __future__ import annotations

import pytest
import torch

from flashrec.errors import ConfigError
from flashrec.kernels import ops
from flashrec.kernels._triton import TritonMode
from flashrec.kernels.linear import pad_fp8_rows
from flashrec.kernels.registry import REGISTRY

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
        ("enable_fused_qk_rope_kv", "qk_norm_rope_store"),
    ],
)
def test_a_switch_that_is_off_is_listed(switch: str, operation: str) -> None:
    chosen = ops.select_ops(CPU, torch.float32, "fp8", **{switch: False})
    assert chosen.choices[operation] == ops.Choice(ops.UNUSED, f"{switch} is off")
    others = {name for name, value in chosen.chosen.items() if value == ops.UNUSED}
    assert others == {operation}


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
    assert chosen["linear_fp8"] == "torch._scaled_mm"
    assert chosen["linear_fp8_decode"] == "triton"


@pytest.mark.parametrize(("rows", "padded"), [(1, 16), (7, 16), (8, 16), (16, 16), (17, 32), (24, 24), (303, 304)])
def test_rows_for_scaled_mm_are_padded_with_zeros(rows: int, padded: int) -> None:
    codes = torch.randint(0, 120, (rows, 32), dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.rand(rows, 1) + 0.5
    wide, wide_scale = pad_fp8_rows(codes, scale)
    assert wide.shape == (padded, 32)
    assert wide_scale.shape == (padded, 1)
    assert torch.equal(wide[:rows].view(torch.uint8), codes.view(torch.uint8))
    assert not wide[rows:].view(torch.uint8).any()
    assert torch.equal(wide_scale[:rows], scale)
