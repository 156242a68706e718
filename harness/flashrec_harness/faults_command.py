"""``flashrec-harness faults``: is every planted fault caught, and is the clean engine green?"""

from __future__ import annotations

import functools
import os
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from flashrec.console import make_console
from flashrec.errors import ConfigError
from flashrec_harness import fault_trials, faults_page, hardware
from flashrec_harness import options as opt
from flashrec_harness.fault_trials import SIDE_BY_SIDE, SUITE, SUITES, Checkpoint, CleanRun
from flashrec_harness.outcome import Check, SuiteContext, exit_code
from flashrec_harness.report import terminal
from flashrec_harness.runner import Session
from flashrec_harness.targets import resolve_catalog, resolve_model

_console = make_console()


def command(
    names: Annotated[list[str] | None, typer.Argument(help="Faults by name. Default: all.", show_default=False)] = None,
    suite: Annotated[
        list[str] | None, typer.Option("--suite", help="Only this suite, and what it must catch. Repeatable.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the faults and who must catch them, and stop.")] = False,
    clean_runs: Annotated[
        int | None,
        typer.Option(
            "--clean-runs",
            min=0,
            help="Runs of each suite with nothing planted. Default: 1; where faults are named, none.",
            show_default=False,
        ),
    ] = None,
    clean_only: Annotated[bool, typer.Option("--clean-only", help="Plant nothing.")] = False,
    model_path: opt.ModelPath = None,
    sid_vocab_file: opt.SidVocabFile = None,
    page: Annotated[Path | None, typer.Option("--page", help="Write the matrix there, as docs/faults.md is.")] = None,
    reports_dir: opt.ReportsDir = Path("reports"),
    strict: opt.Strict = False,
) -> None:
    """Run every planted fault against the suites that must catch it, and the clean engine against all of them."""
    faults = fault_trials.registered()
    unknown = [name for name in names or () if name not in faults] + [one for one in suite or () if one not in SUITES]
    if unknown:
        raise ConfigError(f"faults: no {unknown[0]!r}; there are {', '.join((*SUITES, *faults))}")
    suites = [one for one in SUITES if not suite or one in suite]
    if list_:
        _list(suites)
        return
    clean_runs = (0 if names else 1) if clean_runs is None else clean_runs
    if page is not None and (names or suite or clean_only or not clean_runs):
        raise ConfigError("--page needs a whole run: all faults, all suites, and at least one clean run of each")
    session = _session(reports_dir, model_path, sid_vocab_file)
    directory = session.context_for(SUITE).out_dir
    checkpoint = Checkpoint(model_path, sid_vocab_file)
    checks = [] if clean_only else _try_all(suites, names or [], directory, checkpoint)
    runs, clean = _clean(clean_runs, suites, directory, checkpoint)
    report, where = session.finish({SUITE: [*clean, *checks]})
    if page is not None:
        page.parent.mkdir(parents=True, exist_ok=True)
        date = f"{datetime.now(UTC):%Y-%m-%d}"
        page.write_text(faults_page.render(faults, checks, runs, session.environment, date), encoding="utf-8")
    terminal.show(report, _console, directory=where)
    chosen = {check.name.split(",")[0] for check in checks}
    if chosen:
        rows = faults_page.matrix(
            {name: faults[name] for name in faults if name in chosen}, {c.name: c for c in checks}
        )
        _console.print(terminal.rows_table("who catches what", rows))
    if runs:
        _console.print(terminal.rows_table("clean runs", faults_page.clean_rows(runs)))
    raise typer.Exit(exit_code(report.judged, strict=strict))


def _session(reports_dir: Path, model_path: Path | None, sid_vocab_file: Path | None) -> Session:
    model = resolve_model(model_path)
    context = SuiteContext(model_path=model, sid_vocab_file=resolve_catalog(model, sid_vocab_file), quick=True)
    line = shlex.join(["python", "-m", "flashrec_harness", *sys.argv[1:]])
    return Session.start(context, title=SUITE, command=line, root=reports_dir)


def _list(suites: list[str]) -> None:
    for fault in dict.fromkeys(trial.fault for trial in fault_trials.trials(suites)):
        seers = ", ".join(catch.suite + (" on a GPU" if catch.gpu else "") for catch in fault.catches)
        _console.print(f"{fault.name} ({seers})\n    {fault.what}", markup=False, highlight=False, soft_wrap=True)


def _try_all(suites: list[str], names: list[str], directory: Path, checkpoint: Checkpoint) -> list[Check]:
    checks = []
    for trial in fault_trials.trials(suites, names):
        checks.append(fault_trials.run_trial(trial, directory, checkpoint))
        _say(f"{trial.name}: {faults_page.WORDS[checks[-1].outcome]}", checks[-1].seconds)
    return checks


def _clean(
    times: int, suites: list[str], directory: Path, checkpoint: Checkpoint
) -> tuple[list[CleanRun], list[Check]]:
    """Round by round, every suite once a round, so that a fault that needs time to show meets all of them."""
    runs: list[CleanRun] = []

    def run(number: int, suite: str) -> None:
        found = fault_trials.run_clean(suite, directory / f"clean-{number}-{suite}", checkpoint)
        runs.append(found)
        red = f"RED: {found.red[0]}" if found.red else "no red"
        _say(f"clean {suite}, {number + 1} of {times}: {red}", found.seconds)

    together = [suite for suite in SIDE_BY_SIDE if suite in suites and not hardware.has_gpu()]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for number in range(times):
            list(pool.map(functools.partial(run, number), together))
            for suite in suites:
                if suite not in together:
                    run(number, suite)
    clean = [fault_trials.judge_clean([one for one in runs if one.suite == suite]) for suite in suites if times]
    return runs, clean


def _say(line: str, seconds: float | None) -> None:
    _console.print(line if seconds is None else f"{line} ({seconds:.0f} s)", markup=False, soft_wrap=True)
