"""``flashrec-harness soak | overload``: what only a running server can show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from flashrec_harness import options as opt
from flashrec_harness.outcome import SuiteContext, SuiteFn
from flashrec_harness.planting import Plant

_REPORTS = Path("reports")

MakeContext = Callable[..., SuiteContext]
JudgeWith = Callable[..., None]
"""Runs one suite, writes its report and ends the process with its verdict."""


def add_to(app: typer.Typer, make_context: MakeContext, judge_with: JudgeWith) -> None:
    """Add the commands to ``flashrec-harness``; the other two are how it makes a context and runs a suite."""

    def judge(suite: str, context: SuiteContext, reports: Path, strict: bool, function: SuiteFn) -> None:
        judge_with(suite, context, reports, strict=strict, function=function)

    @app.command()
    def soak(
        model_path: opt.ModelPath = None,
        sid_vocab_file: opt.SidVocabFile = None,
        sid: opt.Sid = None,
        sequences: opt.Sequences = None,
        url: opt.Url = None,
        minutes: Annotated[float, typer.Option("--minutes", min=0.05, help="Length of the load.")] = 20.0,
        concurrency: Annotated[int, typer.Option("--concurrency", min=1, help="Clients at once.")] = 8,
        without: Annotated[
            list[str] | None,
            typer.Option(
                "--without", help="Leave out: cancel, deadline, mistake, flush or reload.", show_default=False
            ),
        ] = None,
        require_gpu: opt.RequireGpu = False,
        seed: opt.Seed = 0,
        strict: opt.Strict = False,
        reports_dir: opt.ReportsDir = _REPORTS,
        plant: Plant = None,
    ) -> None:
        """Minutes of mixed load on a server: nothing may be wrong, leak or grow."""
        from flashrec_harness.soak import SoakSettings, suite

        settings = SoakSettings(minutes=minutes, concurrency=concurrency, without=tuple(without or ()))
        context = make_context(model_path, sid_vocab_file, sid, sequences, url, False, require_gpu, seed)
        judge("soak", context, reports_dir, strict, lambda ctx: suite.run(ctx, settings))

    @app.command()
    def overload(
        model_path: opt.ModelPath = None,
        sid_vocab_file: opt.SidVocabFile = None,
        sid: opt.Sid = None,
        sequences: opt.Sequences = None,
        url: opt.Url = None,
        factor: Annotated[float, typer.Option("--factor", min=1.5, help="Times the capacity.")] = 4.0,
        beam: Annotated[int, typer.Option("--beam", min=1, help="Beams of each request.")] = 32,
        prompt: Annotated[
            int | None, typer.Option("--context", min=1, help="Prompts of so many random tokens. Default: histories.")
        ] = None,
        places: Annotated[
            int, typer.Option("--places", min=2, help="Requests that a server started here holds at once.")
        ] = 64,
        seconds: Annotated[float, typer.Option("--seconds", min=1.0, help="Length of one measurement.")] = 10.0,
        rounds: Annotated[int, typer.Option("--rounds", min=2, help="Overloads, each between two capacities.")] = 5,
        clients: Annotated[int, typer.Option("--clients", min=1, help="Processes that send.")] = 1,
        require_gpu: opt.RequireGpu = False,
        seed: opt.Seed = 0,
        strict: opt.Strict = False,
        reports_dir: opt.ReportsDir = _REPORTS,
        plant: Plant = None,
    ) -> None:
        """A multiple of a server's capacity: goodput must stay, and refusals must be quick."""
        from flashrec_harness.overload import OverloadSettings, suite

        settings = OverloadSettings(
            factor=factor, n=beam, seconds=seconds, rounds=rounds, clients=clients, places=places, context=prompt
        )
        context = make_context(model_path, sid_vocab_file, sid, sequences, url, False, require_gpu, seed)
        judge("overload", context, reports_dir, strict, lambda ctx: suite.run(ctx, settings))
