"""The width that commands print at: of the terminal, of ``COLUMNS``, and of a log where there is neither."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest

WIDTH = [sys.executable, "-c", "from flashrec.console import make_console; print(make_console().width)"]


def _environment(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")} | more


@pytest.mark.parametrize(("more", "width"), [({}, 160), ({"COLUMNS": "97"}, 97)])
def test_a_log_is_as_wide_as_is_asked_or_160(more: dict[str, str], width: int) -> None:
    done = subprocess.run(
        WIDTH, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=_environment(**more), check=True
    )
    assert int(done.stdout) == width


def test_a_pipe_from_a_terminal_has_the_terminal_s_width() -> None:
    """``flashrec-harness show … | less``: the output is a pipe, the errors are the terminal's."""
    above, below = pty.openpty()
    try:
        fcntl.ioctl(below, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 66, 0, 0))
        done = subprocess.run(
            WIDTH, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=below, env=_environment(), check=True
        )
    finally:
        os.close(above)
        os.close(below)
    assert int(done.stdout) == 66
