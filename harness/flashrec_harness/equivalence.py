"""Is a kernel's output its reference's? Tolerances are measured on the data, not picked (HARNESS.md, kernel).

``out`` is the kernel's, ``exact`` the reference evaluated in float64 on the same inputs, and ``eager`` the
reference evaluated in the kernel's own precision: what plain PyTorch would have returned.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch

ROUNDING_SHIFT = 0.3
ERROR_FACTOR = 2.0
DISTANCE_BOUND = {torch.float32: 1e-10, torch.bfloat16: 1e-5, torch.float8_e4m3fn: 1e-3}
"""Largest ``1 - 2<x, y> / (|x|^2 + |y|^2)`` by output dtype."""
FEW_ELEMENTS = 64
"""In a tensor this small one rounding step of one element counts: the bound is then that step, squared."""


class Rule(StrEnum):
    """How one output is compared."""

    MEASURED = "measured"
    CODES = "codes"
    """FP8 codes: at most one code apart, in at most :data:`CODES_APART` of the elements. Where the values come out of a
    sum, codes near zero may be further apart: by as much value as that sum's rounding."""
    BITWISE = "bitwise"


CODES_APART = 0.1
"""Share of codes that may be one apart: a scale in its last bit, or a value at a rounding boundary."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """One comparison: ``error`` against ``bound``, in the output's unit, and what failed if anything did.

    ``detail`` counts what the rule counts (codes apart, elements that differ).
    """

    rule: Rule
    error: float
    bound: float
    failure: str = ""
    detail: str = ""

    @property
    def passed(self) -> bool:
        return not self.failure

    @property
    def ratio(self) -> float:
        """Error over bound: 1 is the limit."""
        if self.error == 0.0:
            return 0.0
        return self.error / self.bound if self.bound else float("inf")


def rounding_floor(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a shift by 0.3 and back costs each element in ``dtype``: the data's own rounding step."""
    rounded = values.to(dtype)
    return (((rounded + ROUNDING_SHIFT) - ROUNDING_SHIFT) - rounded).double().abs()


def distance(x: torch.Tensor, y: torch.Tensor) -> float:
    """``1 - 2<x, y> / (|x|^2 + |y|^2)`` in float64: 0 for equal tensors, 1 for orthogonal ones or a zero."""
    a, b = x.double().flatten(), y.double().flatten()
    norms = float(a @ a + b @ b)
    return 0.0 if norms == 0.0 else 1.0 - 2.0 * float(a @ b) / norms


def compare(
    out: torch.Tensor,
    exact: torch.Tensor,
    eager: torch.Tensor,
    rule: Rule,
    *,
    precision: torch.dtype | None = None,
    codes_apart: float = CODES_APART,
    code_steps: int = 1,
    code_slack: float = 0.0,
) -> Agreement:
    """Judges ``out`` by ``rule``. ``exact`` is not looked at by the rules that compare with ``eager`` alone.

    ``precision`` is the dtype that the values were last rounded to, where the output's own is wider. FP8 codes
    may be ``code_steps`` apart, or ``code_slack`` of the largest code, in a share ``codes_apart`` of the elements.
    """
    if out.shape != eager.shape or out.dtype != eager.dtype:
        found = f"{tuple(out.shape)} {out.dtype}, expected {tuple(eager.shape)} {eager.dtype}"
        return Agreement(rule, float("inf"), 0.0, failure=f"shape or dtype: {found}")
    if out.numel() == 0:
        return Agreement(rule, 0.0, 0.0, detail="no elements")
    if rule is Rule.BITWISE:
        return _bitwise(out, eager)
    if rule is Rule.CODES:
        return _codes(out, eager, codes_apart, code_steps, code_slack)
    return _measured(out, exact, eager, precision or out.dtype)


def _measured(out: torch.Tensor, exact: torch.Tensor, eager: torch.Tensor, precision: torch.dtype) -> Agreement:
    unwritten = int((~torch.isfinite(out)).sum())
    if unwritten:
        failure = f"{unwritten} of {out.numel()} elements are not finite"
        return Agreement(Rule.MEASURED, float("inf"), 0.0, failure=failure)
    error, allowed = (out.double() - exact).abs(), (eager.double() - exact).abs()
    floor = rounding_floor(exact, out.dtype)
    worst, bound = float(error.max()), ERROR_FACTOR * float(allowed.max()) + 2.0 * float(floor.max())
    mean, mean_bound = float(error.mean()), ERROR_FACTOR * float(allowed.mean()) + 2.0 * float(floor.mean())
    apart, apart_bound = distance(out, exact), DISTANCE_BOUND[precision]
    if out.numel() < FEW_ELEMENTS:
        apart_bound = max(apart_bound, torch.finfo(precision).eps ** 2)
    failure = ""
    if worst > bound:
        failure = f"largest error {worst:.3g} above {bound:.3g}"
    elif mean > mean_bound:
        failure = f"mean error {mean:.3g} above {mean_bound:.3g}"
    elif apart > apart_bound:
        failure = f"distance {apart:.3g} above {apart_bound:.0e}"
    return Agreement(Rule.MEASURED, worst, bound, failure, f"mean {mean:.2g}, distance {apart:.1e}")


def _code_order(codes: torch.Tensor) -> torch.Tensor:
    """FP8 codes as integers in the order of their values: neighbours differ by one."""
    bits = codes.contiguous().view(torch.uint8).int()
    magnitude = bits & 0x7F
    return torch.where(bits >= 0x80, -magnitude, magnitude)


def _codes(out: torch.Tensor, eager: torch.Tensor, limit: float, steps_allowed: int, slack: float) -> Agreement:
    if bool(torch.isnan(out.float()).any()):
        return Agreement(Rule.CODES, float("inf"), 1.0, failure="NaN codes")
    steps = (_code_order(out) - _code_order(eager)).abs()
    close = (out.float() - eager.float()).abs() <= slack * torch.finfo(out.dtype).max
    furthest, apart = int(torch.where(close, steps.clamp(max=steps_allowed), steps).max()), int((steps > 0).sum())
    detail = f"{apart} of {out.numel()} codes apart"
    failure = ""
    apart_values = distance(out.float(), eager.float())
    if furthest > steps_allowed:
        failure = f"a code is {furthest} apart"
    elif apart > max(limit * out.numel(), float(limit > 0)):
        failure = f"{detail}: more than {limit:.0%}"
    elif steps_allowed == 1 and apart_values > DISTANCE_BOUND[out.dtype]:
        failure = f"distance {apart_values:.3g} above {DISTANCE_BOUND[out.dtype]:.0e}"
    return Agreement(Rule.CODES, float(furthest), float(steps_allowed), failure, detail)


def _bitwise(out: torch.Tensor, eager: torch.Tensor) -> Agreement:
    ours, theirs = (t.flatten().view(torch.uint8) for t in (out, eager))
    differing = int((ours != theirs).sum())
    failure = f"{differing} of {ours.numel()} bytes differ" if differing else ""
    return Agreement(Rule.BITWISE, float(differing), 0.0, failure)
