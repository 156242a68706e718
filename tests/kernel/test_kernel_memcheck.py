"""The verdict on a memcheck log: clean, an error in a kernel, a blind tool, a machine that refuses it."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from flashrec_harness import kernel_memcheck
from flashrec_harness.outcome import Outcome

DONE = "menu done\n"


def _log(*kernels: str, unnamed: int = 0) -> str:
    """A log as compute-sanitizer 2025.3 writes it, with one error in each of ``kernels``."""
    blocks = [
        f"========= Invalid __global__ read of size 4 bytes\n"
        f"=========     at {kernel}+0xd0 in cases.py:{line}\n"
        f"=========     by thread ({line},0,0) in block (0,0,0)\n"
        f"=========     Access at 0x7f0a is out of bounds\n"
        for line, kernel in enumerate(kernels)
    ]
    count = len(kernels) + unnamed
    return "========= COMPUTE-SANITIZER\n" + "".join(blocks) + f"========= ERROR SUMMARY: {count} errors\n"


def test_only_the_planted_error_is_a_pass() -> None:
    found = kernel_memcheck.judge(_log("planted_overrun", "planted_overrun"), DONE, "")
    assert found.outcome is Outcome.PASS


def test_an_error_in_a_kernel_is_named() -> None:
    found = kernel_memcheck.judge(_log("_silu_mul", "_silu_mul", "planted_overrun"), DONE, "")
    assert found.outcome is Outcome.FAIL
    assert found.reason == "memcheck: _silu_mul (2)"


def test_an_error_that_ends_the_menu_is_still_the_kernels() -> None:
    found = kernel_memcheck.judge(_log("_silu_mul"), "", "RuntimeError: unspecified launch failure")
    assert found.outcome is Outcome.FAIL


@pytest.mark.parametrize(
    ("log", "stdout", "words"),
    [
        (_log(), DONE, "did not report it"),
        (_log("planted_overrun", unnamed=1), DONE, "1 errors that name no kernel"),
        (_log(), "", "ImportError: no such thing"),
        ("========= Target application terminated before first instrumented API call\n", "", "ImportError: no such"),
    ],
)
def test_what_shows_nothing_is_no_pass(log: str, stdout: str, words: str) -> None:
    found = kernel_memcheck.judge(log, stdout, "Traceback\nImportError: no such thing\n")
    assert found.outcome is Outcome.INVALID
    assert words in found.reason


def test_the_reason_is_the_error_and_not_a_note_on_it() -> None:
    stderr = "Traceback (most recent call last):\n  File ...\ntorch.OutOfMemoryError: CUDA\nwhile generating 'case'\n"
    assert kernel_memcheck.judge(_log(), "", stderr).reason == "torch.OutOfMemoryError: CUDA"


def test_a_machine_that_refuses_the_tool_is_not_run() -> None:
    found = kernel_memcheck.judge("========= Error: Device not supported. Please refer to the manual\n", "", "")
    assert found.outcome is Outcome.NOT_RUN
    assert "Device not supported" in found.reason


def test_without_the_tool_it_is_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert kernel_memcheck.check().outcome is Outcome.NOT_RUN


def test_the_child_runs_under_the_tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "compute-sanitizer"
    log = _log("planted_overrun").replace("\n", "\\n")
    tool.write_text(f'#!/bin/sh\n[ -n "$PYTORCH_NO_CUDA_MEMORY_CACHING" ] && printf "{log}" > "$6"\necho "{DONE}"\n')
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    found = kernel_memcheck.check()
    assert found.outcome is Outcome.PASS, found.reason
    assert found.seconds is not None


@pytest.mark.gpu
def test_the_kernels_of_this_machine_keep_to_their_operands() -> None:
    found = kernel_memcheck.check()
    if found.outcome is Outcome.NOT_RUN:
        pytest.skip(found.reason)
    assert found.outcome is Outcome.PASS, f"{found.summary}: {found.reason}"
