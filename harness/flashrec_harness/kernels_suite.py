"""The ``kernel`` suite: every registered device kernel equals its reference (HARNESS.md, kernel)."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import hypothesis
import torch

from flashrec.errors import ConfigError
from flashrec.kernels._triton import MODE, TritonMode
from flashrec.kernels.registry import REGISTRY, Kernel, KernelSpec
from flashrec_harness import hardware, kernel_compile, kernel_invariance, kernel_memcheck, kernel_variants
from flashrec_harness.drawing import VARIABLE, Drawing, drawing, is_nightly, seed_of
from flashrec_harness.kernel_cases import CASES, EXAMPLES, KernelCase, Lane
from flashrec_harness.kernel_check import Verdict, check_case
from flashrec_harness.outcome import Check, Outcome, SuiteContext
from flashrec_harness.runner import repeat_command

SUITE = "kernel"
_INTERPRETER_REASON = (
    "Triton's interpreter is silently wrong for bf16 and FP8 arithmetic and casts; a GPU must judge them"
)


@dataclass(slots=True)
class Tally:
    """All cases of one implementation on one lane, and how they were drawn."""

    drawn: Drawing
    cases: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    worst: Verdict | None = None
    codes_apart: int = 0
    failed: Verdict | None = None

    def add(self, verdict: Verdict) -> None:
        self.cases += 1
        self.codes_apart += verdict.codes_apart
        if self.worst is None or verdict.worst > self.worst.worst:
            self.worst = verdict
        if not verdict.passed:
            self.failed = verdict


class _CaseFailedError(AssertionError):
    """Tells hypothesis that an example failed, so that it looks for a smaller one."""


def lanes() -> list[Lane]:
    """What this machine can judge: bf16 and float32 on a GPU, float32 in Triton's interpreter without one."""
    if MODE is TritonMode.DEVICE:
        device = torch.device("cuda")
        return [Lane(device, dtype, compiled=True) for dtype in (torch.bfloat16, torch.float32)]
    return [Lane(torch.device("cpu"), torch.float32, compiled=False)]


def judge(spec: KernelSpec, name: str, kernel: Kernel, lane: Lane, draw: Drawing) -> Tally:
    """Checks the registered examples, then cases as ``draw`` says; the first failure of these is shrunk."""
    tally = Tally(draw)

    @hypothesis.settings(
        max_examples=draw.examples,
        derandomize=draw.seed is None,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate, hypothesis.Phase.shrink),
        report_multiple_bugs=False,
        verbosity=hypothesis.Verbosity.quiet,
    )
    @hypothesis.given(CASES[spec.name](lane))
    def every_case(case: KernelCase) -> None:
        if name in case.unfit:
            reason = case.unfit[name]
            tally.skipped[reason] = tally.skipped.get(reason, 0) + 1
            return
        verdict = check_case(spec, kernel, case, replay=lane.compiled)
        tally.add(verdict)
        if not verdict.passed:
            raise _CaseFailedError("; ".join(verdict.failures))

    if draw.seed is not None:
        every_case = hypothesis.seed(draw.seed)(every_case)
    for case in EXAMPLES.get(spec.name, _no_examples)(lane):
        every_case = hypothesis.example(case)(every_case)
    try:
        every_case()
    except _CaseFailedError:
        assert tally.failed is not None
    return tally


def _no_examples(_: Lane) -> list[KernelCase]:
    return []


def check_of(spec: KernelSpec, name: str, lane: Lane, tally: Tally) -> Check:
    """The verdict on one implementation."""
    dtype = str(lane.dtype).removeprefix("torch.")
    title = f"{spec.name} ({name}, {dtype}, {lane.device.type})"
    if tally.failed is not None:
        reason = f"{tally.failed.case}: {'; '.join(tally.failed.failures)}"
        summary = f"wrong on the smallest case found, after {tally.cases} cases, {tally.drawn}"
        return Check(SUITE, title, Outcome.FAIL, summary, reason=reason)
    if tally.worst is None:
        reason = "; ".join(tally.skipped) or "no case was drawn"
        return Check(SUITE, title, Outcome.NOT_RUN, "no case was judged", reason=reason)
    how = "eager and graph replay" if lane.compiled else "interpreter: index and mask logic"
    summary = (
        f"{tally.cases} cases, {tally.drawn}, {how}; largest error {tally.worst.worst_error:.2g}, "
        f"{tally.worst.worst:.0%} of its measured bound; {tally.codes_apart} FP8 codes apart"
    )
    data = {"cases": tally.cases, "worst_of_bound": tally.worst.worst, "worst_case": tally.worst.case}
    return Check(SUITE, title, Outcome.PASS, summary, data=data)


def error_row(spec: KernelSpec, name: str, lane: Lane, tally: Tally) -> dict[str, object]:
    """One implementation on one lane: its worst float error beside the bound measured on the same case."""
    judged = tally.failed or tally.worst
    measured = judged is not None and judged.worst_error > 0
    return {
        "kernel": spec.name,
        "implementation": name,
        "dtype": str(lane.dtype).removeprefix("torch."),
        "rule": str(spec.tolerance),
        "cases": tally.cases,
        "worst error": f"{judged.worst_error:.2g}" if judged is not None and measured else "",
        "its bound": f"{judged.worst_error / judged.worst:.2g}" if judged is not None and measured else "",
        "of the bound": f"{judged.worst:.0%}" if judged is not None and measured else "",
        "FP8 codes apart": tally.codes_apart,
        "outcome": str(_outcome(tally)),
    }


def error_report(rows: list[dict[str, object]]) -> Check:
    """Every kernel and dtype with its worst error against its bound."""
    red = [row for row in rows if row["outcome"] == Outcome.FAIL]
    judged = [row for row in rows if row["outcome"] != Outcome.NOT_RUN]
    return Check(
        SUITE,
        "worst error against its bound",
        Outcome.FAIL if red else Outcome.PASS if judged else Outcome.NOT_RUN,
        f"{len(judged)} of {len(rows)} implementations judged, {sum(int(str(row['cases'])) for row in rows)} cases",
        reason=f"{red[0]['kernel']} ({red[0]['implementation']}, {red[0]['dtype']}) is outside its bound"
        if red
        else "",
        rows=rows,
        printed=True,
    )


def _outcome(tally: Tally) -> Outcome:
    if tally.failed is not None:
        return Outcome.FAIL
    return Outcome.NOT_RUN if tally.worst is None else Outcome.PASS


def _repeat(spec: KernelSpec, ctx: SuiteContext) -> str:
    """The command that draws the same cases of one kernel."""
    command = repeat_command(SUITE, replace(ctx, only=spec.name))
    return f"{VARIABLE}=nightly {command}" if is_nightly() else command


def _judge_lane(lane: Lane, ctx: SuiteContext) -> tuple[list[Check], list[dict[str, object]]]:
    examples = (20 if lane.dtype == torch.bfloat16 else 8) if lane.compiled else (8 if ctx.quick else 20)
    draw = drawing(examples, ctx.seed)
    checks, rows = [], []
    for spec in _chosen(ctx.only):
        for name, kernel in spec.implementations.items():
            started = time.monotonic()
            tally = judge(spec, name, kernel, lane, draw)
            checks.append(check_of(spec, name, lane, tally))
            checks[-1].repeat = _repeat(spec, ctx)
            checks[-1].seconds = time.monotonic() - started
            rows.append(error_row(spec, name, lane, tally))
    return checks, rows


def _chosen(only: str | None) -> list[KernelSpec]:
    if only is None:
        return list(REGISTRY.values())
    if only not in REGISTRY:
        raise ConfigError(f"--only {only}: no such kernel; there are {', '.join(REGISTRY)}")
    return [REGISTRY[only]]


def run(ctx: SuiteContext) -> list[Check]:
    """Walks the registry on every lane of this machine; what needs a GPU is ``not run`` without one.

    ``ctx.only`` names a single kernel; ``ctx.seed`` draws other cases, and at night, where it is 0, a new one does
    (``FLASHREC_HYPOTHESIS=nightly``). Raises :class:`ConfigError` where there is none of that name.
    """
    if MODE is TritonMode.ABSENT:
        reason = "Triton is not installed; pip install triton"
        return [Check(SUITE, "registry", Outcome.NOT_RUN, "no kernel was judged", reason=reason)]
    ctx = replace(ctx, seed=seed_of(ctx.seed))
    judged = [_judge_lane(lane, ctx) for lane in lanes()]
    checks = [check for found, _ in judged for check in found]
    checks.append(error_report([row for _, rows in judged for row in rows]))
    if ctx.only is not None:
        return checks
    checks += kernel_invariance.run(lanes())
    if MODE is TritonMode.INTERPRETER:
        reason = f"{hardware.missing_gpu_reason()}; {_INTERPRETER_REASON}"
        names = ", ".join(REGISTRY)
        checks.append(Check(SUITE, "bf16 and FP8 numerics, graph replay", Outcome.NOT_RUN, names, reason=reason))
        checks.append(kernel_compile.check())
    else:
        checks.append(kernel_memcheck.check())
    return [*checks, kernel_variants.check()]
