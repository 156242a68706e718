"""What one kernel test runs on, and the draws that the strategies share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from flashrec_harness.equivalence import CODES_APART, Rule

INTERPRETER_CODE_STEPS = 8
"""Seen with Triton 3.6: a mantissa that rounds up to a power of two keeps its exponent, eight codes too low."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Where kernels run: compiled, on a GPU, or in Triton's interpreter, on a CPU in float32.

    Compiled, shapes are few and large, since each alignment and block size is a variant to compile;
    interpreted, they are many and small.
    """

    device: torch.device
    dtype: torch.dtype
    compiled: bool

    @property
    def code_steps(self) -> int:
        """How far apart FP8 codes may be: one, but the interpreter's cast forgets carries into the exponent."""
        return 1 if self.compiled else INTERPRETER_CODE_STEPS

    def pick(self, interpreted: Sequence[int], compiled: Sequence[int]) -> st.SearchStrategy[int]:
        """A size from this lane's list."""
        return st.sampled_from(compiled if self.compiled else interpreted)


@dataclass(frozen=True, slots=True)
class Argument:
    """A tensor argument and how it may lie in memory: ``pad`` elements between rows, ``offset`` at the start."""

    tensor: torch.Tensor
    pad: int = 0
    offset: int = 0
    writable: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """One thing that a kernel produced, and the rule that judges it.

    ``precision``: what its values were last rounded to, where the tensor's dtype is wider.
    """

    name: str
    tensor: torch.Tensor
    rule: Rule = Rule.MEASURED
    codes_apart: float = CODES_APART
    code_steps: int = 1
    code_slack: float = 0.0
    precision: torch.dtype | None = None


Collect = Callable[[Any, Sequence[Any]], list[Output]]
"""From what a call returned and the arguments it got to what is compared."""


@dataclass(frozen=True, slots=True, repr=False)
class KernelCase:
    """One call of a kernel.

    ``arguments`` hold :class:`Argument`, tuples of them, or plain values; ``exact`` the same call in float64.
    ``unfit`` names implementations that these shapes are not for, with the reason.
    """

    label: str
    arguments: tuple[Any, ...]
    exact: tuple[Any, ...]
    collect: Collect
    unfit: dict[str, str]

    def __repr__(self) -> str:
        return f"KernelCase({self.label})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What hypothesis prints: the label, not the tensors."""
        printer.text(repr(self))


@dataclass(frozen=True, slots=True)
class Draws:
    """Random data of one case: a generator on the CPU, so that both lanes see the same numbers."""

    lane: Lane
    generator: torch.Generator

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        values = torch.randn(*shape, generator=self.generator) * scale
        return values.to(dtype or self.lane.dtype).to(self.lane.device)

    def uniform(self, *shape: int, low: float, high: float) -> torch.Tensor:
        values = torch.rand(*shape, generator=self.generator) * (high - low) + low
        return values.to(self.lane.dtype).to(self.lane.device)

    def integers(self, *shape: int, high: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=self.generator).to(self.lane.device)

    def permutation(self, size: int) -> torch.Tensor:
        return torch.randperm(size, generator=self.generator).to(self.lane.device)


def draws(lane: Lane) -> st.SearchStrategy[Draws]:
    """Seeded data; the seed is part of the example."""
    return st.integers(0, 2**31 - 1).map(lambda seed: Draws(lane, torch.Generator().manual_seed(seed)))


def layouts(lane: Lane) -> st.SearchStrategy[tuple[int, int]]:
    """(pad, offset): contiguous, or strided rows at an unaligned start. A GPU has one of each."""
    return st.sampled_from([(0, 0), (8, 8)] if lane.compiled else [(0, 0), (1, 0), (3, 5), (16, 16)])


def scales() -> st.SearchStrategy[float]:
    """Magnitudes of activations."""
    return st.sampled_from([1.0, 1e-3, 30.0])


def with_zero_row(x: torch.Tensor, wanted: bool) -> torch.Tensor:
    """``x`` with its middle row zero, if wanted and there is one."""
    if wanted and x.shape[0]:
        x[x.shape[0] // 2] = 0.0
    return x


def exact(value: Any) -> Any:
    """A float tensor in float64; anything else as it is."""
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


NO_GLUON = "Gluon kernels run on a Hopper, in bf16, and have no interpreter"


def has_gluon(lane: Lane) -> bool:
    """Whether Gluon kernels can be called: on a Hopper, and on a CPU, where they are compiled for one and not run."""
    hopper = lane.device.type == "cpu" or torch.cuda.get_device_capability(lane.device) == (9, 0)
    return lane.compiled and lane.dtype == torch.bfloat16 and hopper
