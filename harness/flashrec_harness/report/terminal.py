"""A report in a terminal: ``flashrec-harness show`` and the end of every command."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flashrec_harness.outcome import Check, Outcome
from flashrec_harness.report.html import format_cell, format_duration
from flashrec_harness.report.model import RunReport

_STYLES = {
    Outcome.PASS: "green",
    Outcome.FAIL: "bold red",
    Outcome.INCONCLUSIVE: "bold yellow",
    Outcome.INVALID: "bold magenta",
    Outcome.NOT_RUN: "dim",
    Outcome.KNOWN: "yellow",
}


def _checks_table(title: str, checks: list[Check]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", expand=True)
    table.add_column("outcome", no_wrap=True)
    table.add_column("check", ratio=2, overflow="fold")
    table.add_column("what was seen", ratio=5, overflow="fold")
    for check in checks:
        seen = Text(check.summary)
        if check.reason:
            seen = Text(check.reason, style=_STYLES[check.outcome]) + Text(". " if check.summary else "") + seen
        table.add_row(Text(check.outcome, style=_STYLES[check.outcome]), Text(check.name), seen)
    return table


def rows_table(title: str, rows: list[dict[str, object]]) -> Table:
    """Any list of rows with the same keys, numbers to the right."""
    table = Table(title=Text(title), title_justify="left", title_style="bold")
    for key, value in rows[0].items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        table.add_column(Text(key), justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(format_cell(row.get(key))) for key in rows[0]))
    return table


def show(report: RunReport, console: Console, *, directory: Path | None = None) -> None:
    """Print the acceptance lines and every suite's checks; the verdict comes last, where the eye is."""
    if report.lines:
        console.print(_checks_table("acceptance", report.lines))
    for name, checks in report.suites.items():
        console.print(_checks_table(name, checks))
        for check in checks:
            if check.printed and check.rows:
                console.print(rows_table(check.name, check.rows))
    if report.known:
        console.print(rows_table("known failures", report.known))
    for check in (c for checks in report.suites.values() for c in checks):
        if check.commands and check.outcome in (Outcome.FAIL, Outcome.INVALID, Outcome.INCONCLUSIVE):
            console.print(f"repeat {check.suite}: {check.name}\n  ", end="", style="bold", markup=False)
            console.print("\n  ".join(check.commands), markup=False, soft_wrap=True)
    console.print(
        Text(f"{report.title}: {report.headline}", style=_STYLES[report.outcome]),
        Text(f"in {format_duration(report.seconds)}", style="dim"),
    )
    if directory is not None:
        console.print(f"report: {directory / 'report.html'}", markup=False, soft_wrap=True)
