"""Walks the registry: a kernel is tested because it is registered."""

from __future__ import annotations

import pytest
import torch

from flashrec.kernels._triton import MODE, TritonMode
from flashrec.kernels.registry import REGISTRY, Kernel, KernelSpec
from flashrec_harness import hopper, kernel_compile
from flashrec_harness.drawing import drawing, seed_of
from flashrec_harness.kernel_cases import CASES, EXAMPLES, Lane
from flashrec_harness.kernels_suite import check_of, judge
from flashrec_harness.outcome import Outcome

_INTERPRETED = Lane(torch.device("cpu"), torch.float32, compiled=False)
_COMPILED = [Lane(torch.device("cuda"), dtype, compiled=True) for dtype in (torch.bfloat16, torch.float32)]
_WALK = [
    pytest.param(spec, name, kernel, id=f"{spec.name}-{name}")
    for spec in REGISTRY.values()
    for name, kernel in spec.implementations.items()
]


def test_every_registered_kernel_has_cases() -> None:
    assert set(CASES) == set(REGISTRY)
    assert set(EXAMPLES) <= set(REGISTRY)


@pytest.mark.skipif(MODE is not TritonMode.INTERPRETER, reason="kernels are compiled in this process")
@pytest.mark.parametrize(("spec", "name", "kernel"), _WALK)
def test_interpreted(spec: KernelSpec, name: str, kernel: Kernel, harness_seed: int) -> None:
    draw = drawing(8, seed_of(harness_seed))
    check = check_of(spec, name, _INTERPRETED, judge(spec, name, kernel, _INTERPRETED, draw))
    if check.outcome is Outcome.NOT_RUN:
        pytest.skip(check.reason)
    assert check.outcome is Outcome.PASS, f"{check.summary}: {check.reason}"


@pytest.mark.gpu
@pytest.mark.parametrize("lane", _COMPILED, ids=lambda lane: str(lane.dtype))
@pytest.mark.parametrize(("spec", "name", "kernel"), _WALK)
def test_compiled(spec: KernelSpec, name: str, kernel: Kernel, lane: Lane, harness_seed: int) -> None:
    check = check_of(spec, name, lane, judge(spec, name, kernel, lane, drawing(12, seed_of(harness_seed))))
    if check.outcome is Outcome.NOT_RUN:
        pytest.skip(check.reason)
    assert check.outcome is Outcome.PASS, f"{check.summary}: {check.reason}"


@pytest.mark.slow
@pytest.mark.skipif(MODE is not TritonMode.INTERPRETER, reason="kernels are compiled in this process")
def test_every_kernel_compiles_for_hopper_without_a_gpu() -> None:
    check = kernel_compile.check()
    assert check.outcome is Outcome.PASS, check.reason
    assert {row["kernel"] for row in check.rows} >= {"_gemm_kernel", "_prefill_kernel", "merge_kernel"}


_AS_LAUNCHED = """
import json
from flashrec_harness import hopper
hopper.instead_of_launching(lambda launch: launch)
from flashrec.kernels._triton import overlap
print(json.dumps([overlap()]))
"""


@pytest.mark.skipif(MODE is not TritonMode.INTERPRETER, reason="kernels are compiled in this process")
def test_kernels_are_compiled_as_a_hopper_launches_them() -> None:
    """Beginning while the kernel before ends: other code than without."""
    assert hopper.rows_of("-c", _AS_LAUNCHED) == [{"OVERLAP": True, "launch_pdl": True}]
