"""``flashrec-harness baseline``: look at stored baselines and check that none was edited."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashrec.command_line import make_app
from flashrec.console import make_console
from flashrec_harness.outcome import ExitCode
from flashrec_harness.report.terminal import rows_table

app = make_app("baseline", "Stored baselines; `perf --update-baseline --reason ...` writes them.")
_console = make_console()

Directory = Annotated[Path, typer.Argument(help="A baseline file, or a directory of them.")]


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.glob("*/*.json"))


@app.command()
def show(path: Directory = Path("baselines")) -> None:
    """Print centre, noise band and history of each baseline."""
    from flashrec_harness import baselines, stats

    for file in _files(path):
        baseline = baselines.load(file)
        rows = [
            {
                "cell": cell,
                "metric": metric,
                "centre": values["centre"],
                "band ± %": stats.percent(values["band"]),
            }
            for cell, metrics in baseline.summary().items()
            for metric, values in metrics.items()
        ]
        _console.print(rows_table(f"{file}: {len(baseline.sessions)} sessions", rows))
        for entry in baseline.history:
            _console.print(f"  {entry['commit'][:9]}  {entry['reason']}", markup=False)


@app.command()
def verify(path: Directory = Path("baselines")) -> None:
    """Recompute every summary and digest; exit code 1 if a file was edited."""
    from flashrec_harness import baselines

    broken = 0
    for file in _files(path):
        try:
            baselines.load(file)
        except baselines.BaselineError as error:
            broken += 1
            _console.print(f"FAIL {error}", markup=False, soft_wrap=True)
        else:
            _console.print(f"ok   {file}", markup=False)
    raise typer.Exit(ExitCode.FAILED if broken else ExitCode.OK)
