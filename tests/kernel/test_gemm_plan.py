"""Which tiles a product takes: their kinds are compiled at the start, and none of them shows in the bits."""

from __future__ import annotations

import pytest
import torch

from flashrec.kernels._triton import MODE, TritonMode, ceil_div
from flashrec.kernels.agreement import ROWS
from flashrec.kernels.gemm import run_gemm
from flashrec.kernels.gemm_plan import ONE_EACH, GemmPlan, block_k_of, is_small, plan_gemm, small_tiles
from flashrec.kernels.quantize import quant_per_token, quantize_weight
from flashrec_harness.kernels_suite import lanes

OUTS = (5, 100, 1024, 2048, 2560, 4096, 5120, 6144, 8192, 9728, 12288, 19456, 24576)
needs_triton = pytest.mark.skipif(MODE is TritonMode.ABSENT, reason="Triton is not installed")


@pytest.mark.parametrize(
    ("rows", "outs", "plan"),
    [
        (50, 4096, GemmPlan(256, 64, 32, 4, 4)),
        (50, 2048, GemmPlan(256, 64, 16, 4, 4)),
        (256, 2048, GemmPlan(256, 64, 64, 4, 4)),
        (50, 12288, GemmPlan(128, 64, 64, 4, 6)),
        (256, 4096, GemmPlan(128, 64, 64, 4, 6)),
    ],
)
def test_qwen3_takes_the_tiles_that_were_measured(rows: int, outs: int, plan: GemmPlan) -> None:
    """H200, 2026-12-02: the fastest of 18 kinds at these shapes, but for the last two, which kept their tiles."""
    assert plan_gemm(rows, outs, 1) == plan


@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize("outs", OUTS)
def test_wide_tiles_leave_each_multiprocessor_one_at_most_and_no_fewer_rows_would(outs: int, itemsize: int) -> None:
    narrow = block_k_of(itemsize)
    for rows in range(1, 600):
        plan = plan_gemm(rows, outs, itemsize)
        tiles = ceil_div(outs, plan.block_out) * ceil_div(rows, plan.block_rows)
        if plan.block_k == 2 * narrow:
            assert tiles <= ONE_EACH
            fewer = ceil_div(outs, 64) * ceil_div(rows, plan.block_rows // 2)
            assert plan.block_rows == 16 or fewer > ONE_EACH
        else:
            assert plan.block_k == narrow
            assert small_tiles(rows, outs) > ONE_EACH


@pytest.mark.parametrize("outs", OUTS)
def test_a_float32_product_has_one_reduction(outs: int) -> None:
    assert {plan_gemm(rows, outs, 4).block_k for rows in (1, 16, 17, 64, 65, 400, 40_000)} == {block_k_of(4)}


@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize("outs", OUTS)
def test_the_matrix_unit_has_the_outputs_that_it_needs(outs: int, itemsize: int) -> None:
    assert all(plan_gemm(rows, outs, itemsize).block_out >= 64 for rows in (1, 16, 17, 64, 65, 400, 40_000))


@pytest.mark.parametrize("most", [1, 7, 16, 48, 64, 100, 128])
@pytest.mark.parametrize("outs", OUTS)
def test_powers_of_two_ask_for_every_kind_of_tile(outs: int, most: int) -> None:
    """`Prefill.warm_up` launches these row counts, so that no number of prompts compiles anything later."""
    warm = {plan_gemm(1 << power, outs, 1) for power in range((most - 1).bit_length())} | {plan_gemm(most, outs, 1)}
    assert {plan_gemm(rows, outs, 1) for rows in range(1, most + 1) if is_small(rows, outs)} <= warm


@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize("outs", OUTS)
def test_every_kind_of_tile_is_compared_at_construction(outs: int, itemsize: int) -> None:
    tried = {plan_gemm(rows, outs, itemsize) for rows in ROWS if is_small(rows, outs)}
    assert {plan_gemm(rows, outs, itemsize) for rows in range(1, ROWS[-1]) if is_small(rows, outs)} <= tried


@needs_triton
@pytest.mark.parametrize("size", [64, 272, 512, 608])
@pytest.mark.parametrize("fp8", [True, False])
def test_no_kind_of_tile_shows_in_the_bits(size: int, fp8: bool) -> None:
    """Not in float32 either: a K of whole tiles, of broken ones, of less than one; interpreted, or on a GPU."""
    rows, outs = 70, 136
    itemsize = 1 if fp8 else 2
    kinds = {plan_gemm(r, o, itemsize) for o in OUTS for r in (1, 16, 20, 50, 100, 200, 300, 1000)}
    assert {plan.block_k for plan in kinds} == {block_k_of(itemsize), 2 * block_k_of(itemsize)}
    for device in {lane.device for lane in lanes()}:
        generator = torch.Generator().manual_seed(size)
        x = torch.randn(rows, size, generator=generator).bfloat16().to(device)
        w = torch.randn(outs, size, generator=generator).bfloat16().to(device)
        operands = (*quant_per_token(x), *quantize_weight(w)) if fp8 else (x, None, w, None)
        found = {plan: run_gemm(plan, *operands, torch.float32) for plan in kinds}
        first = next(iter(found.values()))
        different = [plan for plan, product in found.items() if not torch.equal(product, first)]
        assert not different
        torch.testing.assert_close(first, _product(*operands), rtol=1e-3, atol=2e-3 * size**0.5)


def _product(
    x: torch.Tensor, x_scale: torch.Tensor | None, w: torch.Tensor, w_scale: torch.Tensor | None
) -> torch.Tensor:
    exact = x.double() @ w.double().T
    return (exact if x_scale is None or w_scale is None else exact * x_scale * w_scale).float()
