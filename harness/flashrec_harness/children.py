"""Child processes that run a module of the harness: same interpreter, same checkout, log kept."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from flashrec_harness import budget

_LOG_TAIL_LINES = 15
_RAISED = re.compile(
    r"^(?P<bar>(?: *\| )?)Traceback \(most recent call last\):\n(?:(?P=bar) {2}.*\n)*(?P=bar)(?P<error>\S.*)",
    re.MULTILINE,
)
"""A traceback's frames are indented, its exception is not; a bar stands before those of an exception group."""


class ChildError(RuntimeError):
    """A child process failed or ran out of time; the message ends with the tail of its log."""


def harness_root() -> Path:
    """The directory to put on ``PYTHONPATH`` for this ``flashrec_harness``."""
    return Path(__file__).parent.parent


def package_path() -> str:
    """``PYTHONPATH`` under which a child imports the same ``flashrec`` and ``flashrec_harness`` as we do."""
    import flashrec

    roots = [str(Path(flashrec.__path__[0]).parent), str(harness_root())]
    return os.pathsep.join([*roots, *filter(None, [os.environ.get("PYTHONPATH")])])


def run_module(
    module: str,
    arguments: Sequence[str],
    *,
    log: Path,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
) -> None:
    """Run ``python -m module arguments`` to its end, its output in ``log``.

    Raises :class:`ChildError` for a non-zero exit or after ``timeout_s``, and
    :class:`~flashrec_harness.budget.BudgetSpent` where the suite's time budget ends first.
    """
    environment = {**os.environ, "PYTHONPATH": package_path(), **(env or {})}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        try:
            code = subprocess.run(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                timeout=timeout_s if (left := budget.seconds_left()) is None else min(timeout_s, left),
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            budget.check()
            raise ChildError(f"{module}: no end after {timeout_s:.0f} s; {_tail(log)}") from None
    if code != 0:
        raise ChildError(f"{module}: exit code {code}; {_tail(log)}")


def last_error(output: str) -> str:
    """The one line that says why a process ended, of what it wrote.

    The exception of the last traceback, since an exception's notes come after it; without one, the last line.
    """
    raised = [match["error"] for match in _RAISED.finditer(output)]
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return (raised or lines or ["no output"])[-1]


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_TAIL_LINES:]
    return f"log {log.name}:\n" + "\n".join(lines)
