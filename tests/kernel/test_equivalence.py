"""The rules that judge kernels, on tensors whose verdict is known."""

from __future__ import annotations

import pytest
import torch

from flashrec.kernels.gemm_plan import empty_rows
from flashrec.kernels.registry import REGISTRY
from flashrec_harness.equivalence import FEW_ELEMENTS, Rule, compare, distance, rounding_floor
from flashrec_harness.guarded import GUARD, PoisonedOutputs, place
from flashrec_harness.kernel_cases.base import Argument, KernelCase, Output
from flashrec_harness.kernel_check import check_case

FP8 = torch.float8_e4m3fn


def _triple(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    exact = torch.randn(64, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return exact, exact.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_value_rounded_once_passes_and_one_wrong_element_fails(dtype: torch.dtype) -> None:
    exact, eager = _triple(dtype)
    assert compare(eager, exact, eager, Rule.MEASURED).passed
    wrong = eager.clone()
    wrong[17, 3] += 0.25
    agreement = compare(wrong, exact, eager, Rule.MEASURED)
    assert "largest error" in agreement.failure
    assert agreement.ratio > 1.0


def test_a_small_error_everywhere_fails_by_its_mean() -> None:
    exact, eager = _triple(torch.bfloat16)
    worst = float((eager.double() - exact).abs().max())
    biased = (exact + worst).bfloat16()
    assert "mean error" in compare(biased, exact, eager, Rule.MEASURED).failure


def test_nan_and_zeros_fail() -> None:
    exact, eager = _triple(torch.float32)
    unwritten = eager.clone()
    unwritten[0, 0] = float("nan")
    assert "not finite" in compare(unwritten, exact, eager, Rule.MEASURED).failure
    for rule in Rule:
        codes = eager.to(FP8)
        reference = codes if rule is Rule.CODES else eager
        assert not compare(torch.zeros_like(reference), exact, reference, rule).passed


def test_shape_and_dtype_must_agree() -> None:
    exact, eager = _triple(torch.float32)
    assert "shape or dtype" in compare(eager[:1], exact, eager, Rule.MEASURED).failure
    assert "shape or dtype" in compare(eager.bfloat16(), exact, eager, Rule.BITWISE).failure


def test_codes_one_apart_are_counted_and_two_apart_fail() -> None:
    values = torch.linspace(-448.0, 448.0, 4001)
    codes = values.to(FP8)
    bits = codes.view(torch.uint8).clone()
    positive = (bits > 8) & (bits < 0x70)
    place_of_one = positive.nonzero()[100]
    one = bits.clone()
    one[place_of_one] += 1
    agreement = compare(one.view(FP8), values.double(), codes, Rule.CODES)
    assert agreement.passed
    assert agreement.detail.startswith("1 of 4001")
    two = bits.clone()
    two[place_of_one] += 2
    assert "2 apart" in compare(two.view(FP8), values.double(), codes, Rule.CODES).failure
    assert not compare(one.view(FP8), values.double(), codes, Rule.CODES, codes_apart=0.0).passed
    many = torch.where(positive, bits + 1, bits)
    assert "more than" in compare(many.view(FP8), values.double(), codes, Rule.CODES).failure


def test_codes_near_zero_may_differ_by_the_rounding_of_a_sum_and_no_more() -> None:
    """2^-8 of 448 is 1.75: 0 and 1.75 are 62 codes apart, 0 and 2 are 64."""
    values = torch.zeros(100)
    values[0] = 448.0
    codes = values.to(FP8)
    near, far = codes.float(), codes.float()
    near[3], far[3] = 1.75, 2.0
    assert compare(near.to(FP8), codes.double(), codes, Rule.CODES, code_slack=2.0**-8).passed
    assert "62 apart" in compare(near.to(FP8), codes.double(), codes, Rule.CODES).failure
    assert "64 apart" in compare(far.to(FP8), codes.double(), codes, Rule.CODES, code_slack=2.0**-8).failure


@pytest.mark.parametrize(("count", "passes"), [(1, True), (FEW_ELEMENTS - 1, True), (FEW_ELEMENTS, False)])
def test_one_rounding_step_counts_in_a_tensor_of_few_elements(count: int, passes: bool) -> None:
    """All elements one bf16 step off: a distance of 3e-5, which a large tensor may not have."""
    exact = torch.full((count,), 1.0)
    out = exact * (1 + 2.0**-7)
    agreement = compare(out, exact.double(), out, Rule.MEASURED, precision=torch.bfloat16)
    assert agreement.passed is passes, agreement


def test_a_sign_flip_is_not_one_code_apart() -> None:
    codes = torch.full((10,), 1.0).to(FP8)
    assert not compare((-codes.float()).to(FP8), codes.double(), codes, Rule.CODES).passed


def test_distance_and_floor() -> None:
    x = torch.tensor([3.0, 4.0])
    assert distance(x, x) == 0.0
    assert distance(x, torch.zeros(2)) == 1.0
    assert distance(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])) == 1.0
    step = rounding_floor(torch.full((1000,), 1.0) + torch.rand(1000) / 3, torch.bfloat16)
    assert 0.0 < float(step.max()) <= 2.0**-7


def test_guards_see_a_write_on_either_side_and_between_rows() -> None:
    for target in (-1, 6, 16):
        placed = place(torch.randn(3, 5), pad=2)
        assert placed.intact()
        flat = placed.buffer[GUARD - 1 :]
        flat[target + 1] = 0.0
        assert placed.intact() is False, target


def test_poisoned_outputs_start_as_nan_and_tell_on_an_overrun() -> None:
    with PoisonedOutputs() as outputs:
        floats, codes = torch.empty(3, 4), torch.empty(5, dtype=FP8)
        counts = torch.empty(2, dtype=torch.int32)
    assert torch.isnan(floats).all()
    assert torch.isnan(codes.float()).all()
    assert counts.tolist() == [0, 0]
    floats.zero_()
    assert outputs.intact()
    torch.as_strided(floats, (1,), (1,), floats.storage_offset() + 12).zero_()
    assert not outputs.intact()


@pytest.mark.parametrize("several", [False, True])
def test_room_behind_the_rows_that_are_returned_is_not_theirs(several: bool) -> None:
    """Rows of a product have room behind them, which hides a row too many from the band."""
    with PoisonedOutputs() as outputs:
        room, other = torch.empty(8, 4), torch.empty(3)
    rows = room[:5]
    rows.zero_()
    other.zero_()
    returned = [rows, rows[1:3]] if several else [rows]
    assert outputs.intact(returned)
    room[5, 0] = 0.0
    assert outputs.intact()
    assert not outputs.intact(returned)


@pytest.mark.parametrize("beyond", [0, 1])
def test_a_kernel_that_writes_a_row_too_many_fails(beyond: int) -> None:
    """Planted: into the room that the rows of a product have behind them."""
    spec = REGISTRY["silu_mul"]
    gate_up = torch.randn(5, 16, generator=torch.Generator().manual_seed(3))

    def kernel(x: torch.Tensor) -> torch.Tensor:
        out = empty_rows(5, 8, x.dtype, x.device)
        out.as_strided((5 + beyond, 8), (8, 1)).copy_(torch.cat((spec.reference(x), torch.zeros(beyond, 8))))
        return out

    case = KernelCase("5 rows", (Argument(gate_up),), (gate_up.double(),), lambda out, _: [Output("out", out)], {})
    assert check_case(spec, kernel, case).failures == ["wrote outside an output it allocated"] * beyond
