"""A stand-in for a Hopper where none need be: Triton compiles for it in a child process, since this one interprets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from flashrec_harness.children import ChildError, last_error, package_path

COMPUTE_CAPABILITY = 90
_TIMEOUT_S = 300.0
_Run = Callable[..., Any]


class _Driver:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", COMPUTE_CAPABILITY, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


def instead_of_launching(replace: Callable[[_Run], _Run]) -> None:
    """In the child: from now on Triton compiles for a Hopper, and a launch calls what ``replace`` makes of it."""
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(_Driver())
    JITFunction.run = replace(JITFunction.run)


def rows_of(*arguments: str) -> list[dict[str, Any]]:
    """The JSON list that ``python *arguments`` prints without the interpreter.

    Raises :class:`ChildError` for a non-zero exit, with what it ended with, or when it does not end.
    """
    try:
        child = subprocess.run(
            [sys.executable, *arguments],
            env=os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": package_path()},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise ChildError(f"no end after {_TIMEOUT_S:.0f} s") from None
    if child.returncode:
        raise ChildError(last_error(child.stderr))
    rows: list[dict[str, Any]] = json.loads(child.stdout)
    return rows
