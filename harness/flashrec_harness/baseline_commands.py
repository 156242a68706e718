"""``flashrec-harness baseline``: look at stored baselines, check that none was edited, write one from sessions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashrec.command_line import make_app
from flashrec.console import make_console
from flashrec.errors import ConfigError
from flashrec_harness.outcome import ExitCode
from flashrec_harness.report.terminal import rows_table

app = make_app("baseline", "Stored baselines; `perf --update-baseline --reason ...` writes them, too.")
_console = make_console()

Directory = Annotated[Path, typer.Argument(help="A baseline file, or a directory of them.")]


def _files(path: Path) -> list[Path]:
    """Raises :class:`ConfigError` where there is no baseline: nothing would be looked at."""
    files = [path] if path.is_file() else sorted([*path.glob("*.json"), *path.glob("*/*.json")])
    if not files:
        raise ConfigError(f"{path}: no baseline: name a file, a device's directory, or the directory of all devices")
    return files


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
        boots = f"{baseline.boots} boots" if baseline.boots > 1 else "one boot"
        _console.print(rows_table(f"{file}: {len(baseline.sessions)} sessions of {boots}", rows))
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


@app.command()
def write(
    workload: Annotated[str, typer.Argument(help="The workload's name.")],
    reason: Annotated[str, typer.Option(help="Why the baseline changes; kept in its file.")],
    reports_dir: Annotated[Path, typer.Option(help="Where the sessions are: DIR/RUN/perf.")] = Path("reports"),
    baselines_dir: Annotated[Path, typer.Option(help="Where the baseline goes.")] = Path("baselines"),
    commit: Annotated[str, typer.Option(help="Beginning of the measured commit. Default: the newest session's.")] = "",
    accept_wider: Annotated[bool, typer.Option("--accept-wider", help="Allow a wider noise band.")] = False,
) -> None:
    """Write a baseline from the stored sessions of one commit, measuring nothing.

    For sessions of several machines: gather their folders of reports in one.
    """
    from flashrec_harness.perf import gathered

    written = gathered.write(
        workload, reports_dir, baselines_dir, commit=commit, reason=reason, accept_wider=accept_wider
    )
    rows: list[dict[str, object]] = [
        {"session": session.run_id, "boot": session.boot_id[:8]} for session in written.sessions
    ]
    _console.print(f"{written.path}: {len(written.sessions)} sessions", markup=False, soft_wrap=True)
    _console.print(rows_table("sessions", rows))
    for why, count in sorted(written.left_out.items()):
        _console.print(f"left out: {count}, {why}", markup=False)
    for change in written.changes:
        _console.print(f"  {change}", markup=False, soft_wrap=True)
