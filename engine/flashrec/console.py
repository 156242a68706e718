"""Where commands print: a terminal at its own width, a log or a pipe at one that tables can be read at."""

from __future__ import annotations

import os
import sys

from rich.console import Console

_LOG_COLUMNS = 160
"""With the 80 that rich takes, a table of eight columns breaks every word; the logs of CI are wider."""


def make_console(*, stderr: bool = False) -> Console:
    """A console on standard output or error; ``COLUMNS`` sets its width, else the terminal it is run from."""
    return Console(stderr=stderr, width=log_columns())


def log_columns() -> int | None:
    """How wide to print where nobody says: ``None`` in a terminal and with ``COLUMNS``."""
    streams = (sys.__stdin__, sys.__stdout__, sys.__stderr__)
    in_terminal = any(stream is not None and not stream.closed and stream.isatty() for stream in streams)
    return None if in_terminal or "COLUMNS" in os.environ else _LOG_COLUMNS
