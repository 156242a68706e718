"""Every kernel under compute-sanitizer's memcheck: no access outside an allocation, and a planted one is found."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from flashrec.kernels._triton import jit, tl
from flashrec.kernels.registry import REGISTRY
from flashrec_harness.children import last_error
from flashrec_harness.kernel_cases import Lane
from flashrec_harness.kernel_compile import call_own
from flashrec_harness.outcome import Check, Outcome

SUITE = "kernel"
TOOL = "compute-sanitizer"
TITLE = "no access outside an allocation (memcheck)"
_EXAMPLES = 3
_TIMEOUT_S = 240
_BLOCK = 64
_DONE = "menu done"
_REFUSED = "Device not supported"
_SUMMARY = re.compile(r"={9} ERROR SUMMARY: (\d+) error")
_ERROR = re.compile(r"={9} (Invalid \S+ \S+) of size \d+ bytes\n={9}\s+at (?:void )?([\w:]+)")


@jit
def planted_overrun(source: tl.tensor, out: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Reads ``source[BLOCK : 2 * BLOCK]``, all of it past the end: the control that memcheck must report."""
    lane = tl.arange(0, BLOCK)
    tl.store(out + lane, tl.load(source + BLOCK + lane))


CONTROL = "planted_overrun"


def total_errors(log: str) -> int:
    """What the log's last line says."""
    return sum(int(count) for count in _SUMMARY.findall(log))


def errors(log: str) -> Counter[str]:
    """How many errors memcheck's ``log`` holds, by the kernel in which they are."""
    return Counter(kernel for _, kernel in _ERROR.findall(log))


def check() -> Check:
    """Runs the menu and then the control in a child under memcheck; *not run* where the machine has no such tool.

    The child's tensors have device allocations of their own: within the caching allocator's large ones an access
    past a tensor's end would go unseen.
    """
    tool = shutil.which(TOOL)
    if tool is None:
        return _not_run(f"{TOOL} is not on the PATH; it comes with the CUDA toolkit")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "memcheck.txt"
        command = [tool, "--tool", "memcheck", "--report-api-errors", "no", "--log-file", str(log)]
        try:
            child = subprocess.run(
                [*command, sys.executable, "-m", __name__],
                env=os.environ
                | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return _check(Outcome.INCONCLUSIVE, "not done in time", f"{TOOL} took more than {_TIMEOUT_S} s")
        found = judge(log.read_text(encoding="utf-8") if log.exists() else "", child.stdout, child.stderr)
    found.seconds = time.monotonic() - started
    return found


def judge(log: str, stdout: str, stderr: str) -> Check:
    """The verdict on what memcheck wrote to ``log``, and the child under it to its two streams."""
    refusal = next((line for line in log.splitlines() if _REFUSED in line), None)
    if refusal is not None and _DONE not in stdout:
        return _not_run(f"{TOOL}: {refusal.strip('= ')}")
    by_kernel = errors(log)
    control = by_kernel.pop(CONTROL, 0)
    if by_kernel:
        places = ", ".join(f"{kernel} ({count})" for kernel, count in by_kernel.most_common())
        return _check(Outcome.FAIL, f"{by_kernel.total()} errors in {len(by_kernel)} kernels", f"memcheck: {places}")
    unnamed = total_errors(log) - control
    if unnamed:
        reason = f"memcheck counts {unnamed} errors that name no kernel"
        return _check(Outcome.INVALID, "errors outside kernels", reason)
    if _DONE not in stdout:
        return _check(Outcome.INVALID, "the menu did not run to its end", last_error(stderr)[:400])
    if not control:
        return _check(Outcome.INVALID, "blind", f"{CONTROL} reads past its operand, and memcheck did not report it")
    return _check(Outcome.PASS, f"{len(REGISTRY)} kernels, {_EXAMPLES} cases each: no error; the planted one was found")


def _check(outcome: Outcome, summary: str, reason: str = "") -> Check:
    return Check(SUITE, TITLE, outcome, summary, reason=reason, repeat="flashrec-harness kernel --require-gpu")


def _not_run(reason: str) -> Check:
    return _check(Outcome.NOT_RUN, "no kernel was watched", reason)


def run_menu() -> None:
    """A few cases of each registered kernel, then the control; for a process under memcheck."""
    lane = Lane(torch.device("cuda"), torch.bfloat16, compiled=True)
    for spec in REGISTRY.values():
        call_own(spec, lane, _EXAMPLES)
        torch.cuda.synchronize()
    print(_DONE, flush=True)
    source, out = (torch.zeros(_BLOCK, device="cuda") for _ in range(2))
    planted_overrun[(1,)](source, out, BLOCK=_BLOCK)
    with contextlib.suppress(RuntimeError):  # memcheck ends the context of a kernel that erred
        torch.cuda.synchronize()


if __name__ == "__main__":
    run_menu()
