"""Which cases the kernel suite draws: the same ones, a seed's, new ones at night, and always the past bugs'."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import hypothesis
import pytest
import torch

from flashrec.errors import ConfigError
from flashrec.kernels._triton import MODE, TritonMode
from flashrec.kernels.decode_work import SPLIT_TOKENS
from flashrec.kernels.registry import REGISTRY
from flashrec_harness import drawing, kernels_suite
from flashrec_harness.drawing import Drawing
from flashrec_harness.kernel_cases import EXAMPLES, KernelCase, Lane, attention
from flashrec_harness.kernels_suite import judge
from flashrec_harness.outcome import Check, Outcome, SuiteContext

CPU = Lane(torch.device("cpu"), torch.float32, compiled=False)
COMPILED = Lane(torch.device("cpu"), torch.bfloat16, compiled=True)


@pytest.fixture(autouse=True)
def _keep_profile() -> Iterator[None]:
    profile = hypothesis.settings.get_current_profile_name()
    yield
    hypothesis.settings.load_profile(profile)


@pytest.fixture
def labels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The cases that are judged, in order."""
    seen: list[str] = []
    real = kernels_suite.check_case

    def check_case(spec: Any, kernel: Any, case: KernelCase, **how: Any) -> Any:
        seen.append(case.label)
        return real(spec, kernel, case, **how)

    monkeypatch.setattr(kernels_suite, "check_case", check_case)
    return seen


def drawn(labels: list[str], draw: Drawing, name: str = "silu_mul") -> list[str]:
    labels.clear()
    judge(REGISTRY[name], "reference", REGISTRY[name].reference, CPU, draw)
    return list(labels)


def test_a_seed_draws_other_cases_and_repeats_them(labels: list[str]) -> None:
    same = drawn(labels, Drawing(10))
    seeded = drawn(labels, Drawing(10, seed=5))
    assert drawn(labels, Drawing(10)) == same
    assert drawn(labels, Drawing(10, seed=5)) == seeded
    assert len({tuple(same), tuple(seeded), tuple(drawn(labels, Drawing(10, seed=6)))}) == 3


def test_the_budget_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    drawing.load("ci")
    assert drawing.drawing(8, drawing.seed_of(0)) == Drawing(8)
    assert drawing.drawing(8, drawing.seed_of(7)) == Drawing(8, 7)
    drawing.load("nightly")
    assert drawing.seed_of(7) == 7
    assert drawing.drawing(8, 7) == Drawing(40, 7)
    assert len({drawing.seed_of(0) for _ in range(5)}) == 5
    # A command has no plugin that loads a profile, and hypothesis loads one named "ci" of its own in a CI.
    hypothesis.settings.register_profile("ci", hypothesis.settings())
    hypothesis.settings.load_profile("ci")
    monkeypatch.delenv(drawing.VARIABLE, raising=False)
    assert not drawing.is_nightly()
    monkeypatch.setenv(drawing.VARIABLE, "nightly")
    assert drawing.is_nightly()
    monkeypatch.setenv(drawing.VARIABLE, "weekly")
    with pytest.raises(ConfigError, match="FLASHREC_HYPOTHESIS=weekly: name one of ci, nightly"):
        drawing.is_nightly()


@pytest.mark.skipif(MODE is TritonMode.ABSENT, reason="Triton is not installed")
def test_the_summary_names_the_seed_and_the_command_repeats_it(
    suite_context: SuiteContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = replace(suite_context, only="silu_mul", seed=11)
    drawing.load("ci")
    (check, *_) = kernels_suite.run(context)
    assert "drawn with seed 11" in check.summary
    assert "--only silu_mul --quick" in check.repeat
    assert check.repeat.endswith("--seed 11")
    (check, *_) = kernels_suite.run(replace(context, seed=0))
    assert "the same examples each time" in check.summary
    assert "--seed" not in check.repeat
    drawing.load("nightly")
    (check, *_) = kernels_suite.run(replace(context, seed=12))
    assert check.repeat.startswith("FLASHREC_HYPOTHESIS=nightly ")
    assert check.data["cases"] == (100 if check.name.endswith("cuda)") else 40)


def test_past_bugs_are_judged_first_whatever_is_drawn(labels: list[str]) -> None:
    for seed in (None, 3):
        first = drawn(labels, Drawing(2, seed), "linear_fp8")[0]
        assert first.startswith("M 16, N 100, K 1000")
    wanted = {"M 7, N 2048, K 2048, offset 0", "M 7, N 2048, K 2048, offset 1", "M 16, N 100, K 1000, offset 0"}
    assert wanted <= {case.label for case in EXAMPLES["linear_fp8"](COMPILED)}


def test_a_registered_example_alone_makes_a_kernel_red() -> None:
    """Wrong for 257 rows only, which no strategy of a CPU draws."""
    reference = REGISTRY["quant_per_token"].reference

    def wrong(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scale = reference(x)
        return codes, scale * 2 if x.shape[0] == 257 else scale

    tally = judge(REGISTRY["quant_per_token"], "planted", wrong, CPU, Drawing(4))
    assert tally.failed is not None
    assert tally.failed.case == "257 x 64"
    assert kernels_suite.check_of(REGISTRY["quant_per_token"], "planted", CPU, tally).outcome is Outcome.FAIL


def test_a_multiplied_reciprocal_shows_in_the_registered_rows() -> None:
    """The past bug itself: ``x * (1 / 448)`` for ``x / 448``."""
    reference = REGISTRY["quant_per_token"].reference

    def by_reciprocal(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        largest = x.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-12)
        return reference(x)[0], largest * torch.tensor(1 / 448.0)

    (case,) = EXAMPLES["quant_per_token"](CPU)
    x = case.arguments[0].tensor
    assert (by_reciprocal(x)[1] != reference(x)[1]).any()


def test_contexts_end_around_a_split() -> None:
    assert {SPLIT_TOKENS // 4, SPLIT_TOKENS // 4 + 1} <= set(attention._GPU_LENGTHS)
    assert {SPLIT_TOKENS - 1, SPLIT_TOKENS, SPLIT_TOKENS + 1} <= set(attention._GPU_LENGTHS)
    assert {4 * SPLIT_TOKENS, 4 * SPLIT_TOKENS + 1} <= set(attention._GPU_LENGTHS)


@pytest.mark.skipif(MODE is TritonMode.ABSENT, reason="Triton is not installed")
def test_a_whole_run_has_a_line_for_all_that_is_judged(
    suite_context: SuiteContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes long and is tested by itself is replaced; what puts it together is not."""

    def line(name: str) -> Check:
        return Check("kernel", name, Outcome.PASS, "")

    monkeypatch.setattr(kernels_suite, "_chosen", lambda only: [REGISTRY["silu_mul"]])
    monkeypatch.setattr(kernels_suite.kernel_invariance, "run", lambda lanes: [line("rows")])
    for name in ("compile", "memcheck", "variants"):
        module = getattr(kernels_suite, f"kernel_{name}")
        monkeypatch.setattr(module, "check", lambda name=name: line(name))
    found = [check.name for check in kernels_suite.run(suite_context)]
    device = "memcheck" if MODE is TritonMode.DEVICE else "compile"
    assert {"rows", device, "variants"} <= set(found)
    assert any(name.startswith("silu_mul (") for name in found)
