"""Why a child process ended, read from what the interpreter itself writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flashrec_harness.children import last_error

NOTED = """
error = MemoryError("no room")
error.add_note("while generating 'case'")
error.add_note("You can reproduce this example")
raise error
"""
CHAINED = """
try:
    raise KeyError("first")
except KeyError as error:
    raise ValueError("second\\nand more of it") from error
"""
GROUP = """
noted = TypeError("inner")
noted.add_note("a note")
def fails():
    raise noted
try:
    fails()
except TypeError as error:
    raise ExceptionGroup("several", [ValueError("other"), error])
"""
NESTED = """
def fails():
    fails_deeper()
def fails_deeper():
    raise OSError(
        "deep"
    )
fails()
"""


@pytest.mark.parametrize(
    ("program", "error"),
    [
        (NOTED, "MemoryError: no room"),
        (CHAINED, "ValueError: second"),
        (GROUP, "TypeError: inner"),
        (NESTED, "OSError: deep"),
        ("raise SystemExit('error: no such suite')", "error: no such suite"),
        ("no python", "SyntaxError: invalid syntax"),
        ("raise SystemExit(3)", "no output"),
    ],
)
def test_the_exception_is_named(program: str, error: str, tmp_path: Path) -> None:
    file = tmp_path / "program.py"  # of a file the interpreter shows the lines, too
    file.write_text(program)
    child = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=False)
    assert child.returncode != 0
    assert last_error(child.stderr) == error
