"""Commands that read what a run left behind: ``show``, ``compare`` and ``repro``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from flashrec.console import make_console
from flashrec_harness.outcome import ExitCode, exit_code
from flashrec_harness.planting import Plant, planted
from flashrec_harness.report import terminal
from flashrec_harness.report.model import load

if TYPE_CHECKING:
    from flashrec_harness.repro import Bundle, Wave

_console = make_console()


def show(
    run: Annotated[Path, typer.Argument(help="A run's directory or results.json.")] = Path("reports") / "latest",
) -> None:
    """Print a report in the terminal."""
    report = load(run)
    terminal.show(report, _console, directory=run if run.is_dir() else run.parent)
    raise typer.Exit(exit_code(report.judged))


def compare(
    before: Annotated[Path, typer.Argument(help="The older run.")],
    after: Annotated[Path, typer.Argument(help="The newer run.")],
) -> None:
    """What changed between two runs: environment, outcomes, figures."""
    from flashrec_harness.report import comparison

    raise typer.Exit(comparison.show(load(before), load(after), _console))


def repro(
    file: Annotated[Path, typer.Argument(help="A bundle that a suite saved.", exists=True, dir_okay=False)],
    plant: Plant = None,
) -> None:
    """Replay a failing request. Exit code 1 while it still differs from the reference (or from itself).

    A request whose bits drifted is replayed in its wave, beside the request alone.
    """
    from flashrec_harness import repro as bundles

    bundle = bundles.load_bundle(file)
    absent = [name for name in bundle.planted if name not in (plant or ())]
    if absent:
        flags = " ".join(f"--plant {name}" for name in absent)
        _console.print(f"found with faults planted on purpose, replayed without: {flags} plants them", markup=False)
    with planted():
        _replay(bundle)


def _replay(bundle: Bundle) -> NoReturn:
    from flashrec_harness import repro as bundles

    if bundle.wave is not None:
        _replay_wave(bundle, bundle.wave)
    again = bundles.replay(bundle)
    rows = bundles.compare(bundle, again)
    _console.print(f"{bundle.suite}: {bundle.reason}", markup=False)
    _console.print(terminal.rows_table("beams", rows))
    as_then = [dict(beam) for beam in bundle.observed] == again
    _console.print(f"the bits observed then: {'the same again' if as_then else 'different now'}", markup=False)
    raise typer.Exit(ExitCode.OK if all(row["same"] for row in rows) else ExitCode.FAILED)


def _replay_wave(bundle: Bundle, wave: Wave) -> NoReturn:
    from flashrec_harness.determinism import replay as waves

    rows = waves.replay(bundle, wave)
    _console.print(f"{bundle.suite}, {wave.axis}: {bundle.reason}", markup=False)
    _console.print(f"alone and in its wave of {len(wave.requests)} requests, in place {wave.at}", markup=False)
    _console.print(terminal.rows_table("beams", rows))
    if all(row["same"] for row in rows):
        _console.print(f"no bit differs. Where it needs what ran before the wave: {waves.again(wave)}", markup=False)
        raise typer.Exit(ExitCode.OK)
    raise typer.Exit(ExitCode.FAILED)
