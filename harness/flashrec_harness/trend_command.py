"""``flashrec-harness trend WORKLOAD``: stored sessions over commits, with change points."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashrec.console import make_console
from flashrec_harness import options as opt
from flashrec_harness.outcome import ExitCode
from flashrec_harness.report.terminal import rows_table

if TYPE_CHECKING:
    from flashrec_harness.perf.history import Trend

_console = make_console()


def command(
    workload: Annotated[str, typer.Argument(help="The workload's name, as its sessions were stored.")],
    reports_dir: opt.ReportsDir = Path("reports"),
    baselines_dir: opt.BaselinesDir = Path("baselines"),
    html: Annotated[
        Path | None, typer.Option("--html", help="Where the plots go. Default: trend-WORKLOAD.html beside the reports.")
    ] = None,
) -> None:
    """A workload's stored sessions over commits, and where its figures changed their level.

    For people: it fails nothing. ``perf`` judges against the baseline, ``perf --against REV`` decides.
    """
    from flashrec_harness.perf import history

    every = history.sessions_of(workload, reports_dir, baselines_dir)
    if not every:
        typer.echo(f"error: no stored session of workload {workload!r} in {reports_dir} or {baselines_dir}", err=True)
        raise typer.Exit(ExitCode.USAGE)
    sessions = history.comparable(every)
    found = history.trends(sessions)
    _console.print(
        rows_table(
            f"{workload}: {len(sessions)} sessions on {sessions[-1].hard['device']}",
            [{"cell": t.cell, "metric": t.metric, "over commits": history.describe(t)} for t in found],
        )
    )
    if len(every) > len(sessions):
        _console.print(f"{len(every) - len(sessions)} sessions of another device, model or workload left out")
    if changes := [row for trend in found for row in trend.rows()]:
        _console.print(rows_table("change points", changes))
    page = html or reports_dir / f"trend-{workload}.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(_page(workload, found), encoding="utf-8")
    _console.print(f"plots: {page}", markup=False, soft_wrap=True)


def _page(workload: str, found: Sequence[Trend]) -> str:
    from flashrec_harness.perf.history import describe
    from flashrec_harness.report import html, svg

    cards = [f"<section class='card'><p>{escape(describe(one))}</p>{svg.render(one.plot())}</section>" for one in found]
    return html.render_page(f"Trend of {workload}", f"<h1>Trend of {escape(workload)}</h1>{''.join(cards)}")
