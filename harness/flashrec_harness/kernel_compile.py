"""Compiles every registered kernel for Hopper on a machine without a GPU: type errors and spills show early.

Triton carries its own assembler, so only the launch is missing: see :mod:`.hopper`.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import hypothesis
import torch
from hypothesis import strategies as st

from flashrec.kernels.registry import GLUON, REGISTRY, TRITON, Kernel, KernelSpec
from flashrec_harness import hopper
from flashrec_harness.children import ChildError
from flashrec_harness.kernel_cases import CASES, KernelCase, Lane
from flashrec_harness.kernel_cases.base import Argument, has_gluon
from flashrec_harness.outcome import Check, Outcome

_EXAMPLES = 4
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)")


@dataclass(frozen=True, slots=True)
class Compiled:
    """One compiled variant: registers a thread, bytes of stack a thread (spills), bytes of shared memory."""

    kernel: str
    registers: int
    stack: int
    shared: int


def _resources(name: str, binary: Any) -> Compiled:
    """Reads a compiled kernel's resources with the tool that Triton carries."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(binary.asm["cubin"])
        cubin.flush()
        listing = subprocess.run(
            [tool, "-res-usage", cubin.name], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    found = _USAGE.search(listing)
    if found is None:
        raise RuntimeError(f"cuobjdump said nothing about {name}: {listing[:200]!r}")
    registers, stack, _ = (int(number) for number in found.groups())
    return Compiled(name, registers, stack, int(binary.metadata.shared))


def compile_registered() -> list[Compiled]:
    """Compiles a few cases of each registered kernel; for a process with ``TRITON_INTERPRET=0`` and no GPU."""
    variants: dict[str, Compiled] = {}

    def compiled(launch: Any) -> Any:
        def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            binary = launch(self, *args, grid=grid, warmup=True, **kwargs)
            if binary.hash not in variants:
                variants[binary.hash] = _resources(self.__name__, binary)
            return binary

        return compile_only

    hopper.instead_of_launching(compiled)
    lane = Lane(torch.device("cpu"), torch.bfloat16, compiled=True)
    for spec in REGISTRY.values():
        call_own(spec, lane, _EXAMPLES)
    return list(variants.values())


def call_own(spec: KernelSpec, lane: Lane, count: int) -> None:
    """Calls each kernel of ours on the first ``count`` drawn cases that are for it, and judges nothing.

    Raises ``RuntimeError`` for one that no case is for.
    """
    for name in (TRITON, GLUON) if has_gluon(lane) else (TRITON,):
        if name in spec.implementations and not _call(name, spec.implementations[name], CASES[spec.name](lane), count):
            raise RuntimeError(f"{spec.name}: no case is for the {name} kernel")


def _call(name: str, kernel: Kernel, cases: st.SearchStrategy[KernelCase], count: int) -> int:
    called = 0

    @hypothesis.settings(
        max_examples=4 * count,
        derandomize=True,
        deadline=None,
        database=None,
        phases=(hypothesis.Phase.generate,),
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(cases)
    def call(case: KernelCase) -> None:
        nonlocal called
        if name not in case.unfit and called < count:
            kernel(*(a.tensor if isinstance(a, Argument) else a for a in case.arguments))
            called += 1

    call()
    return called


def check() -> Check:
    """Runs :func:`compile_registered` in a child process; fails on a compile error or a register spill."""
    title = f"every kernel compiles for sm_{hopper.COMPUTE_CAPABILITY}"
    try:
        rows = hopper.rows_of("-m", __name__)
    except ChildError as error:
        return Check("kernel", title, Outcome.FAIL, "a kernel does not compile", reason=str(error)[:400])
    spilled = sorted({row["kernel"] for row in rows if row["stack"]})
    summary = f"{len(rows)} variants, at most {max(row['registers'] for row in rows)} registers a thread"
    reason = f"registers spill in {', '.join(spilled)}" if spilled else ""
    outcome = Outcome.FAIL if spilled else Outcome.PASS
    return Check("kernel", title, outcome, summary, reason=reason, rows=rows, repeat="flashrec-harness kernel")


if __name__ == "__main__":
    print(json.dumps([asdict(variant) for variant in compile_registered()]))
