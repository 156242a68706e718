"""``flashrec-harness bisect SUITE --good REV``: the first commit at which a verdict turned."""

from __future__ import annotations

from typing import Annotated

import typer

from flashrec.console import make_console
from flashrec_harness.outcome import ExitCode

_console = make_console()
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}
"""What the suite is to be told is not the bisection's to know."""


def command(
    context: typer.Context,
    suite: Annotated[
        str,
        typer.Argument(help="kernel, parity, determinism, perf; golden for any changed bit.", show_default=False),
    ],
    good: Annotated[str, typer.Option("--good", help="A revision at which the verdict is a pass.")],
    bad: Annotated[
        str | None, typer.Option("--bad", help="One at which it fails. Default: the working tree.", show_default=False)
    ] = None,
    check: Annotated[str, typer.Option("--check", help="Only checks of this name; * and ? as in file names.")] = "*",
) -> None:
    """Find the first bad commit: the engine of each in a work tree, judged by this harness.

    Every other option goes to the suite. Exit code 0 if a commit is named, 4 if history does not decide.
    """
    from flashrec_harness import bisect
    from flashrec_harness.worktrees import Repository

    repository = Repository.around()
    passing = repository.resolve(good)
    failing = repository.resolve(bad) if bad else repository.snapshot()
    judge = bisect.suite_judge(suite, context.args, check, passing)

    def announce(step: bisect.Step) -> None:
        _console.print(f"{step.word:<5} {step.revision.sha[:9]} {step.subject}: {step.why}", markup=False)

    try:
        found = bisect.first_bad(repository, passing, failing, judge, announce)
    except bisect.UndecidedError as error:
        _console.print(f"undecided: {error}", markup=False, soft_wrap=True)
        raise typer.Exit(ExitCode.UNDECIDED) from None
    _console.print(f"first bad commit: {found.revision.sha} {found.subject}", markup=False, soft_wrap=True)
