"""Runs one kernel on one case and judges everything it wrote, and everything it should not have."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from flashrec.kernels.registry import Kernel, KernelSpec
from flashrec_harness.equivalence import Agreement, Rule, compare
from flashrec_harness.guarded import Placed, PoisonedOutputs, place
from flashrec_harness.kernel_cases.base import Argument, KernelCase, Output


@dataclass(slots=True)
class Verdict:
    """What one case showed. ``failures`` name the output and the reason; empty means the case passed."""

    case: str
    worst: float = 0.0
    """Largest error over its bound among the float outputs."""
    worst_error: float = 0.0
    codes_apart: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.failures

    def note(self, where: str, agreement: Agreement) -> None:
        if agreement.rule is Rule.MEASURED and agreement.ratio >= self.worst:
            self.worst, self.worst_error = agreement.ratio, agreement.error
        if agreement.rule is Rule.CODES and agreement.detail[:1].isdigit():
            self.codes_apart += int(agreement.detail.split(" ", 1)[0])
        if not agreement.passed:
            self.failures.append(f"{where}: {agreement.failure}")


def check_case(spec: KernelSpec, kernel: Kernel, case: KernelCase, *, replay: bool = False) -> Verdict:
    """Runs ``kernel`` eagerly on ``case`` and, with ``replay``, once more from a captured CUDA graph.

    Outputs start as NaN; operands and outputs stand between guard bands; zeros in the outputs' place must fail.
    """
    verdict = Verdict(case.label)
    plain = [_plain(argument) for argument in case.arguments]
    expected = case.collect(spec.reference(*plain), plain)
    truth_arguments = [_copied(value) for value in case.exact]
    truth = case.collect(spec.reference(*truth_arguments), truth_arguments)
    placed, arguments = _place(case.arguments)
    with PoisonedOutputs() as outputs, np.errstate(over="ignore"):  # exp overflows to inf, as on a device
        result = kernel(*arguments)
    produced = case.collect(result, arguments)
    _judge(verdict, produced, truth, expected)
    _check_bands(verdict, placed, outputs, result)
    if replay and verdict.passed and any(output.tensor.numel() for output in produced):
        _check_replay(verdict, kernel, case, produced)
    return verdict


def _plain(argument: Any) -> Any:
    """The argument as a contiguous copy, as the reference gets it."""
    return argument.tensor.clone() if isinstance(argument, Argument) else argument


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _place(arguments: Sequence[Any]) -> tuple[list[Placed], list[Any]]:
    placed: list[Placed] = []
    values: list[Any] = []
    for argument in arguments:
        if not isinstance(argument, Argument):
            values.append(argument)
            continue
        target = place(argument.tensor, pad=argument.pad, offset=argument.offset, writable=argument.writable)
        placed.append(target)
        values.append(target.view)
    return placed, values


def _judge(verdict: Verdict, produced: Sequence[Output], truth: Sequence[Output], expected: Sequence[Output]) -> None:
    for ours, exact, eager in zip(produced, truth, expected, strict=True):
        verdict.note(ours.name, _agreement(ours.tensor, exact, eager))
        if _nonzero(eager.tensor) and _agreement(torch.zeros_like(eager.tensor), exact, eager).passed:
            verdict.failures.append(f"{ours.name}: zeros would pass, so this case shows nothing")


def _agreement(tensor: torch.Tensor, exact: Output, eager: Output) -> Agreement:
    return compare(
        tensor,
        exact.tensor,
        eager.tensor,
        eager.rule,
        precision=eager.precision,
        codes_apart=eager.codes_apart,
        code_steps=eager.code_steps,
        code_slack=eager.code_slack,
    )


def _nonzero(tensor: torch.Tensor) -> bool:
    return bool(tensor.float().nan_to_num(nan=1.0).abs().max() > 0) if tensor.numel() else False


def _check_bands(verdict: Verdict, placed: Sequence[Placed], outputs: PoisonedOutputs, result: Any) -> None:
    returned = [value for value in tree_leaves(result) if isinstance(value, torch.Tensor)]
    if not all(target.intact() for target in placed):
        verdict.failures.append("wrote outside its outputs, into or beside an operand")
    if not outputs.intact(returned):
        verdict.failures.append("wrote outside an output it allocated")


def _check_replay(verdict: Verdict, kernel: Kernel, case: KernelCase, eager: Sequence[Output]) -> None:
    """Captures the call, with its poisoned outputs, and replays it on fresh operands: the same bits."""
    placed, arguments = _place(case.arguments)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        # A call on no rows may launch nothing.
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        with PoisonedOutputs() as outputs, torch.cuda.graph(graph):
            result = kernel(*arguments)
    for target in placed:
        target.buffer.copy_(target.before)
    graph.replay()
    torch.cuda.synchronize()
    for replayed, ours in zip(case.collect(result, arguments), eager, strict=True):
        agreement = compare(replayed.tensor, ours.tensor, ours.tensor, Rule.BITWISE)
        if not agreement.passed:
            verdict.failures.append(f"{ours.name}: graph replay differs from the eager call: {agreement.failure}")
    _check_bands(verdict, placed, outputs, result)
