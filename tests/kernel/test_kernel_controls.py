"""Kernels that are wrong on purpose: each fault must be red."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashrec.kernels._triton import MODE, TritonMode, jit, next_power_of_2, tl
from flashrec.kernels.quantize import quant_per_token
from flashrec.kernels.registry import REGISTRY
from flashrec.kernels.silu_mul import silu_mul
from flashrec_harness.drawing import Drawing
from flashrec_harness.kernel_cases import Lane
from flashrec_harness.kernels_suite import error_report, error_row, judge, lanes
from flashrec_harness.outcome import Outcome

BLOCK = 64


def _wrong_in_last_partial_block(gate_up: torch.Tensor) -> torch.Tensor:
    out = silu_mul(gate_up)
    whole = out.shape[1] // BLOCK * BLOCK
    out[:, whole:] *= 1.01
    return out


def _zeros(gate_up: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(silu_mul(gate_up))


def _one_row_unwritten(gate_up: torch.Tensor) -> torch.Tensor:
    right = silu_mul(gate_up)
    out = torch.empty(right.shape, dtype=right.dtype, device=right.device)
    out[:-1] = right[:-1]
    return out


OVERRUN = 8
"""Elements: within the guard band, since a device runs whatever was written over its memory."""


@jit
def _copy_too_much(
    source: tl.tensor, out: tl.tensor, size: tl.tensor, OVERRUN: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Copies ``source[size]`` and zeros behind it."""
    lane = tl.arange(0, BLOCK)
    tl.store(out + lane, tl.load(source + lane, mask=lane < size, other=0.0), mask=lane < size + OVERRUN)


def _writes_past_its_output(gate_up: torch.Tensor) -> torch.Tensor:
    right = silu_mul(gate_up).contiguous()
    out = torch.empty(right.shape, dtype=right.dtype, device=right.device)
    size = right.numel()
    if size:
        _copy_too_much[(1,)](right, out, size, OVERRUN=OVERRUN, BLOCK=next_power_of_2(size + OVERRUN))
    return out


def _writes_its_input(gate_up: torch.Tensor) -> torch.Tensor:
    out = silu_mul(gate_up)
    gate_up.mul_(2.0)
    return out


def _scale_dropped(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scale = quant_per_token(x)
    return codes, torch.ones_like(scale)


def _scale_ignored(
    x: torch.Tensor, x_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    product: torch.Tensor = REGISTRY["linear_fp8"].reference(x, torch.ones_like(x_scale), w, w_scale, dtype)
    return product


def _forgets_own_tokens(*arguments: Any) -> torch.Tensor:
    """Decode attention over the context alone."""
    changed = (*arguments[:10], 0, *arguments[11:])
    out: torch.Tensor = REGISTRY["shared_prefix_attention"].reference(*changed)
    return out


def _sees_one_token_too_many(*arguments: Any) -> torch.Tensor:
    """A causal mask that is off by one."""
    changed = (*arguments[:6], arguments[6] + 1, *arguments[7:])
    out: torch.Tensor = REGISTRY["paged_prefill_attention"].reference(*changed)
    return out


def _stores_at_the_next_slot(*arguments: Any) -> torch.Tensor:
    """K and V one slot further on."""
    slots, num_slots = arguments[2], arguments[7].shape[0]
    changed = (*arguments[:2], (slots + 1) % num_slots, *arguments[3:])
    out: torch.Tensor = REGISTRY["qk_norm_rope_store"].reference(*changed)
    return out


_FAULTS = [
    ("silu_mul", _wrong_in_last_partial_block, "largest error"),
    ("silu_mul", _zeros, "largest error"),
    ("silu_mul", _one_row_unwritten, "not finite"),
    ("silu_mul", _writes_past_its_output, "outside an output"),
    ("silu_mul", _writes_its_input, "into or beside an operand"),
    ("quant_per_token", _scale_dropped, "scale"),
    ("linear_fp8", _scale_ignored, "out"),
    ("shared_prefix_attention", _forgets_own_tokens, "out"),
    ("paged_prefill_attention", _sees_one_token_too_many, "out"),
    ("qk_norm_rope_store", _stores_at_the_next_slot, "stored"),
]


@pytest.mark.skipif(MODE is TritonMode.ABSENT, reason="Triton is not installed")
@pytest.mark.parametrize(("name", "fault", "said"), _FAULTS, ids=[fault.__name__ for _, fault, _ in _FAULTS])
def test_a_planted_fault_is_red(name: str, fault: Callable[..., Any], said: str) -> None:
    lane: Lane = lanes()[0]
    tally = judge(REGISTRY[name], "planted", fault, lane, Drawing(12))
    assert tally.failed is not None, f"{fault.__name__} passed {tally.cases} cases"
    assert any(said in failure for failure in tally.failed.failures), tally.failed.failures


def test_the_references_themselves_pass() -> None:
    lane = lanes()[0]
    for name in ("silu_mul", "quant_per_token", "linear_fp8"):
        tally = judge(REGISTRY[name], "reference", REGISTRY[name].reference, lane, Drawing(6))
        assert tally.failed is None, tally.failed
        assert tally.cases > 0


def test_the_report_puts_the_worst_error_beside_its_bound() -> None:
    lane, spec = lanes()[0], REGISTRY["silu_mul"]
    right = judge(spec, "reference", spec.reference, lane, Drawing(6))
    row = error_row(spec, "reference", lane, right)
    assert (row["kernel"], row["dtype"], row["outcome"]) == ("silu_mul", str(lane.dtype)[6:], "pass")
    assert right.worst is not None
    assert float(str(row["worst error"])) <= float(str(row["its bound"]))
    wrong = error_row(spec, "zeros", lane, judge(spec, "zeros", _zeros, lane, Drawing(6)))
    assert float(str(wrong["worst error"])) > float(str(wrong["its bound"]))
    assert error_report([row]).outcome is Outcome.PASS
    report = error_report([row, wrong])
    assert (report.outcome, report.printed) == (Outcome.FAIL, True)
    assert report.reason.startswith("silu_mul (zeros, ")
