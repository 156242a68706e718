"""Which tiles a product takes: their kinds are compiled at the start, and none of them shows in the bits."""

from __future__ import annotations

import pytest
import torch

from flashrec.kernels import gemm_gluon
from flashrec.kernels._triton import MODE, TritonMode, ceil_div
from flashrec.kernels.agreement import ROWS, rows_to_try
from flashrec.kernels.gemm import run_gemm
from flashrec.kernels.gemm_plan import (
    MULTIPROCESSORS,
    TALLEST,
    GemmPlan,
    block_k_of,
    empty_rows,
    is_small,
    plan_gemm,
    tiles_of,
    with_room,
)
from flashrec.kernels.ops import is_hopper
from flashrec.kernels.quantize import quant_per_token, quantize_weight
from flashrec.runtime.prefill import warm_up_counts
from flashrec_harness.kernels_suite import lanes

OUTS = (5, 100, 1024, 2048, 2560, 4096, 5120, 6144, 8192, 9728, 12288, 19456, 24576)
needs_triton = pytest.mark.skipif(MODE is TritonMode.ABSENT, reason="Triton is not installed")


@pytest.mark.parametrize(
    ("rows", "outs", "plan"),
    [
        (50, 4096, GemmPlan(256, 64, 32, 4, 6)),
        (50, 2048, GemmPlan(256, 64, 16, 4, 6)),
        (256, 2048, GemmPlan(256, 64, 64, 4, 6)),
        (256, 4096, GemmPlan(256, 64, 128, 4, 4)),
        (16, 12288, GemmPlan(128, 64, 16, 4, 6)),
        (50, 12288, GemmPlan(128, 64, 64, 4, 4)),
        (256, 12288, GemmPlan(128, 64, 128, 4, 3)),
        (320, 12288, GemmPlan(128, 128, 64, 4, 4)),
    ],
)
def test_qwen3_takes_the_tiles_that_were_measured(rows: int, outs: int, plan: GemmPlan) -> None:
    """H200, 2026-12-02: within 3 % of the fastest of 45 kinds at these shapes."""
    assert plan_gemm(rows, outs, 1) == plan


@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize("outs", OUTS)
def test_wide_tiles_leave_each_multiprocessor_one_at_most_and_no_fewer_rows_would(outs: int, itemsize: int) -> None:
    narrow = block_k_of(itemsize)
    for rows in range(1, 600):
        plan = plan_gemm(rows, outs, itemsize)
        tiles = ceil_div(outs, plan.block_out) * ceil_div(rows, plan.block_rows)
        if plan.block_k == 2 * narrow:
            assert tiles <= MULTIPROCESSORS
            fewer = ceil_div(outs, 64) * ceil_div(rows, plan.block_rows // 2)
            assert plan.block_rows == 16 or fewer > MULTIPROCESSORS
        else:
            assert plan.block_k == narrow
            assert tiles_of(rows, outs, TALLEST) > MULTIPROCESSORS


@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize("outs", OUTS)
def test_a_multiprocessor_holds_the_tiles_that_it_is_given(outs: int, itemsize: int) -> None:
    """By the 227 KB of shared memory of a Hopper, and 1 KB that each program takes for itself."""
    for rows in range(1, 2000):
        plan = plan_gemm(rows, outs, itemsize)
        tiles = ceil_div(outs, plan.block_out) * ceil_div(rows, plan.block_rows)
        bytes_each = (plan.block_out + plan.block_rows) * plan.block_k * itemsize * plan.stages + 1024
        together = 1 if tiles <= MULTIPROCESSORS else 3 if plan.block_out == 64 else 2
        assert together * bytes_each <= 227 * 1024
        assert plan.stages >= 3


@pytest.mark.parametrize("rows", [1, 50, 64, 100, 128, 129, 200])
@pytest.mark.parametrize("block_rows", [16, 64, 128])
def test_a_tile_of_rows_made_for_a_product_ends_in_their_storage(rows: int, block_rows: int) -> None:
    x = empty_rows(rows, 48, torch.float32, torch.device("cpu"))
    assert x.shape == (rows, 48)
    assert x.is_contiguous()
    whole = with_room(x, block_rows)
    assert whole.shape == (ceil_div(rows, block_rows) * block_rows, 48)
    assert whole.data_ptr() == x.data_ptr()
    assert whole.stride() == x.stride()


def test_rows_without_room_stay_as_they_are() -> None:
    """Behind the last rows of a storage there is nothing that may be read, not even one element."""
    storage = torch.zeros(128 * 48 + 5)
    whole = storage[5:].view(128, 48)
    assert with_room(whole[:100], 64).shape == (128, 48)
    assert with_room(whole[1:101], 64).shape == (100, 48)
    narrow = whole[:, :40]
    assert with_room(narrow[:100], 64).shape == (128, 40)
    exact = torch.zeros(100, 48)
    assert with_room(exact, 64) is exact


@pytest.mark.parametrize("outs", OUTS)
def test_a_float32_product_has_one_reduction(outs: int) -> None:
    assert {plan_gemm(rows, outs, 4).block_k for rows in (1, 16, 17, 64, 65, 400, 40_000)} == {block_k_of(4)}


@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize("outs", OUTS)
def test_the_matrix_unit_has_the_outputs_that_it_needs(outs: int, itemsize: int) -> None:
    assert all(plan_gemm(rows, outs, itemsize).block_out >= 64 for rows in (1, 16, 17, 64, 65, 400, 40_000))


@pytest.mark.parametrize("most", [1, 7, 16, 48, 64, 100, 128, 200, 330, 400, 700, 1024])
@pytest.mark.parametrize("outs", OUTS)
def test_warming_up_compiles_every_kind_of_tile(outs: int, most: int) -> None:
    """So that no number of prompts compiles anything later."""
    warm = {plan_gemm(count, outs, 1) for count in warm_up_counts(most)}
    assert {plan_gemm(rows, outs, 1) for rows in range(1, most + 1) if is_small(rows, outs)} <= warm


@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize("outs", [*OUTS, 448, 512, 960, 1280, 1536, 1856])
def test_every_kind_of_tile_is_compared_at_construction(outs: int, itemsize: int) -> None:
    """The last widths have kinds in ranges of 64 rows."""
    tried = {plan_gemm(rows, outs, itemsize) for rows in rows_to_try(outs, itemsize) if is_small(rows, outs)}
    assert {plan_gemm(rows, outs, itemsize) for rows in range(1, ROWS[-1]) if is_small(rows, outs)} <= tried
    assert set(ROWS) <= set(rows_to_try(outs, itemsize))


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
        found: dict[object, torch.Tensor] = {plan: run_gemm(plan, *operands, torch.float32) for plan in kinds}
        if fp8 and has_gluon(device):
            found |= {(plan, "gluon"): gemm_gluon.run_gemm(plan, *operands, torch.float32) for plan in kinds}
        first = next(iter(found.values()))
        different = [plan for plan, product in found.items() if not torch.equal(product, first)]
        assert not different
        torch.testing.assert_close(first, _product(*operands), rtol=1e-3, atol=2e-3 * size**0.5)


def _product(
    x: torch.Tensor, x_scale: torch.Tensor | None, w: torch.Tensor, w_scale: torch.Tensor | None
) -> torch.Tensor:
    exact = x.double() @ w.double().T
    return (exact if x_scale is None or w_scale is None else exact * x_scale * w_scale).float()


@needs_triton
@pytest.mark.parametrize("garbage", [0x7F, 0xFF, 0x7E])
def test_what_lies_behind_the_rows_changes_nothing(garbage: int) -> None:
    """NaN of both signs, and the largest number."""
    rows, outs, size = 70, 136, 512
    for device in {lane.device for lane in lanes()}:
        generator = torch.Generator().manual_seed(7)
        x = torch.randn(rows, size, generator=generator).bfloat16().to(device)
        w = quantize_weight(torch.randn(outs, size, generator=generator).bfloat16().to(device))
        codes, scale = quant_per_token(x)
        room = empty_rows(rows, size, codes.dtype, codes.device)
        with_room(room, 128).view(torch.uint8).fill_(garbage)
        room.copy_(codes)
        for plan in {plan_gemm(r, o, 1) for o in OUTS for r in (1, 16, 20, 50, 100, 200, 300, 1000)}:
            found = run_gemm(plan, room, scale, *w, torch.float32)
            assert torch.equal(found, run_gemm(plan, codes.clone(), scale, *w, torch.float32)), plan
            if has_gluon(device):
                assert torch.equal(found, gemm_gluon.run_gemm(plan, room, scale, *w, torch.float32)), plan


def has_gluon(device: torch.device) -> bool:
    return device.type == "cuda" and is_hopper(device)


@pytest.mark.parametrize(("name", "offset", "size"), [("x", 8, 64), ("w", 8, 64), ("x", 0, 72)])
def test_gluon_refuses_rows_that_the_copy_engine_cannot_fetch(name: str, offset: int, size: int) -> None:
    operands = {one: torch.zeros(16, size, dtype=torch.float8_e4m3fn) for one in ("x", "w")}
    storage = torch.zeros(16 * size + offset, dtype=torch.uint8).view(torch.float8_e4m3fn)
    operands[name] = storage[offset:].view(16, size)
    with pytest.raises(ValueError, match=f"rows of {name} do not begin at multiples of 16 bytes; take the Triton"):
        gemm_gluon.linear_fp8_gluon(operands["x"], torch.ones(16, 1), operands["w"], torch.ones(16), torch.bfloat16)
