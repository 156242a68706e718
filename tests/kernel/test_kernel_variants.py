"""What is asked for decides nothing that Triton compiles for."""

from __future__ import annotations

import pytest

from flashrec.kernels._triton import MODE, TritonMode
from flashrec_harness import hopper, kernel_variants
from flashrec_harness.kernel_variants import SHAPES, Variants, judged
from flashrec_harness.outcome import Outcome

FORGETFUL = """
import json, dataclasses
import flashrec.kernels._gluon as gluon
import flashrec.kernels._triton as triton
ours, theirs = triton.jit, gluon.gluon_jit
triton.jit = lambda function, *, name=None, varying=(): ours(function, name=name)
gluon.gluon_jit = lambda function, *, name=None, varying=(): theirs(function)
from flashrec_harness.kernel_variants import count
print(json.dumps([dataclasses.asdict(one) for one in count()]))
"""
needs_triton = pytest.mark.skipif(MODE is TritonMode.ABSENT, reason="Triton is not installed")


@needs_triton
def test_no_length_makes_a_kernel_compile_anew() -> None:
    check = kernel_variants.check()
    assert check.outcome is Outcome.PASS, check.reason
    assert {row["kernel"] for row in check.rows} > SHAPES.keys()


@needs_triton
def test_kernels_that_do_not_say_what_varies_are_found() -> None:
    """Planted: every kernel without its ``varying``."""
    found = [Variants(**row) for row in hopper.rows_of("-c", FORGETFUL)]
    assert {one.kernel for one in found if one.variants > one.shapes} == SHAPES.keys()
    check = judged(found)
    assert check.outcome is Outcome.FAIL
    assert "gemm._gemm_kernel: " in check.reason
    assert "variants of 10 shapes: name what varies" in check.reason


def test_a_constant_that_follows_from_a_length_is_found() -> None:
    usual = [Variants(name, 9, shapes, shapes) for name, shapes in SHAPES.items()]
    assert judged(usual).outcome is Outcome.PASS
    check = judged([*usual, Variants("new.kernel", 9, 3, 3)])
    assert check.outcome is Outcome.FAIL
    assert check.reason == "new.kernel: 3 shapes: a compile-time constant follows from a length"
    assert judged(usual[1:]).reason == "gemm._gemm_kernel was not launched"


def test_nothing_launched_is_no_evidence() -> None:
    assert judged([]).outcome is Outcome.FAIL
