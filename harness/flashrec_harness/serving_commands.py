"""``flashrec-harness soak | overload | http-cost``: what only a running server can show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

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

    def judge(
        suite: str, context: SuiteContext, reports: Path, strict: bool, function: SuiteFn, budget: float | None = None
    ) -> None:
        judge_with(suite, context, reports, strict=strict, function=function, budget=budget)

    @app.command()
    def soak(
        model_path: opt.ModelPath = None,
        sid_vocab_file: opt.SidVocabFile = None,
        sid: opt.Sid = None,
        sequences: opt.Sequences = None,
        url: opt.Url = None,
        minutes: Annotated[
            float | None, typer.Option("--minutes", min=0.05, help="Length of the load. Default: 20; --quick: 0.75.")
        ] = None,
        concurrency: Annotated[
            int | None, typer.Option("--concurrency", min=1, help="Clients at once. Default: 8.")
        ] = None,
        without: Annotated[
            list[str] | None,
            typer.Option(
                "--without", help="Leave out: cancel, deadline, mistake, flush or reload.", show_default=False
            ),
        ] = None,
        quick: opt.Quick = False,
        require_gpu: opt.RequireGpu = False,
        seed: opt.Seed = 0,
        strict: opt.Strict = False,
        reports_dir: opt.ReportsDir = _REPORTS,
        plant: Plant = None,
    ) -> None:
        """Minutes of mixed load on a server: nothing may be wrong, leak or grow."""
        from flashrec_harness.soak import suite

        base = suite.QUICK if quick else suite.SoakSettings()
        settings = replace(base, **_given(minutes=minutes, concurrency=concurrency), without=tuple(without or ()))
        context = make_context(model_path, sid_vocab_file, sid, sequences, url, quick, require_gpu, seed)
        judge("soak", context, reports_dir, strict, lambda ctx: suite.run(ctx, settings))

    @app.command()
    def overload(
        model_path: opt.ModelPath = None,
        sid_vocab_file: opt.SidVocabFile = None,
        sid: opt.Sid = None,
        sequences: opt.Sequences = None,
        url: opt.Url = None,
        factor: Annotated[float, typer.Option("--factor", min=1.5, help="Times the capacity.")] = 4.0,
        beam: Annotated[
            int | None, typer.Option("--beam", min=1, help="Beams of each request. Default: 32; --quick: 16.")
        ] = None,
        prompt: Annotated[
            int | None, typer.Option("--context", min=1, help="Prompts of so many random tokens. Default: histories.")
        ] = None,
        places: Annotated[
            int | None,
            typer.Option(
                "--places", min=2, help="Requests that a server started here holds at once. Default: 64; --quick: 24."
            ),
        ] = None,
        seconds: Annotated[
            float | None,
            typer.Option(
                "--seconds",
                min=0.5,
                help="Length of a measured capacity, and half of an overload. Default: 5; --quick: 1.5.",
            ),
        ] = None,
        rounds: Annotated[
            int | None,
            typer.Option(
                "--rounds",
                min=2,
                help="Overloads, each between two capacities, before each look. Default: 5; --quick: 3.",
            ),
        ] = None,
        looks: Annotated[
            int | None,
            typer.Option("--looks", min=1, help="Looks until it is decided, at most. Default: 4; --quick: 3."),
        ] = None,
        clients: Annotated[int, typer.Option("--clients", min=1, help="Processes that send.")] = 1,
        quick: opt.Quick = False,
        require_gpu: opt.RequireGpu = False,
        seed: opt.Seed = 0,
        strict: opt.Strict = False,
        reports_dir: opt.ReportsDir = _REPORTS,
        plant: Plant = None,
    ) -> None:
        """A multiple of a server's capacity: goodput must stay, and refusals must be quick."""
        from flashrec_harness.overload import suite

        base = suite.QUICK if quick else suite.OverloadSettings()
        given = _given(n=beam, context=prompt, places=places, seconds=seconds, rounds=rounds, looks=looks)
        settings = replace(base, factor=factor, clients=clients, **given)
        context = make_context(model_path, sid_vocab_file, sid, sequences, url, quick, require_gpu, seed)
        judge("overload", context, reports_dir, strict, lambda ctx: suite.run(ctx, settings))

    @app.command("http-cost")
    def http_cost(
        model_path: opt.ModelPath = None,
        sid_vocab_file: opt.SidVocabFile = None,
        sid: opt.Sid = None,
        http_processes: Annotated[
            int | None,
            typer.Option("--http-processes", min=0, help="The server's flag. Default: the server's own."),
        ] = None,
        clients: Annotated[
            int | None, typer.Option("--clients", min=1, help="Processes that send. Default: 8; --quick: 2.")
        ] = None,
        seconds: Annotated[
            float | None,
            typer.Option("--seconds", min=0.1, help="Length of each side of a round, about. Default: 4; --quick: 1.5."),
        ] = None,
        rounds: Annotated[
            int | None,
            typer.Option("--rounds", min=1, help="Pairs of measurements at each point. Default: 4; --quick: 3."),
        ] = None,
        at: Annotated[
            int | None, typer.Option("--at", min=1, help="Only the points with so many requests at once.")
        ] = None,
        quick: opt.Quick = False,
        require_gpu: opt.RequireGpu = False,
        seed: opt.Seed = 0,
        budget: opt.Budget = None,
        strict: opt.Strict = False,
        reports_dir: opt.ReportsDir = _REPORTS,
        plant: Plant = None,
    ) -> None:
        """A server against the engine in process: throughput must stay, the tail must be short, bits the same."""
        from flashrec_harness.httpcost import suite

        base = suite.QUICK if quick else suite.HttpCostSettings()
        given = _given(http_processes=http_processes, clients=clients, seconds=seconds, rounds=rounds, at=at)
        settings = replace(base, **given)
        context = make_context(model_path, sid_vocab_file, sid, None, None, quick, require_gpu, seed)
        judge("http-cost", context, reports_dir, strict, lambda ctx: suite.run(ctx, settings), budget)


def _given(**options: Any) -> dict[str, Any]:
    """The options that were on the command line."""
    return {name: value for name, value in options.items() if value is not None}
