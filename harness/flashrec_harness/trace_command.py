"""``flashrec-harness trace``: take a trace of a server under a load and judge it, or read one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from flashrec.console import make_console
from flashrec_harness import options as opt
from flashrec_harness.outcome import SuiteContext
from flashrec_harness.planting import Plant

_REPORTS = Path("reports")


def add_to(app: typer.Typer, make_context: Callable[..., SuiteContext], judge_with: Callable[..., None]) -> None:
    """Add the command to ``flashrec-harness``; the other two are how it makes a context and runs a suite."""
    console = make_console()

    @app.command()
    def trace(
        file: Annotated[
            Path | None, typer.Argument(help="A Chrome trace (.json or .json.gz) to read.", exists=True)
        ] = None,
        html: Annotated[
            Path | None, typer.Option("--html", help="Where the picture goes. Default: beside the trace.")
        ] = None,
        fp8_gemms: Annotated[
            int | None, typer.Option("--fp8-gemms", help="FP8 products that each forward pass in FILE should show.")
        ] = None,
        search_share: Annotated[
            float | None,
            typer.Option(
                "--search-share", min=0, max=1, help="Most that head, expansion and trie in FILE may take of decode."
            ),
        ] = None,
        trim: Annotated[
            Path | None, typer.Option("--trim", help="Write a small copy of FILE: a few waves, at most 300 KB.")
        ] = None,
        waves: Annotated[int, typer.Option("--waves", min=1, help="With --trim: waves to keep, after the first.")] = 2,
        busy: Annotated[
            float | None,
            typer.Option(
                "--busy", min=0, max=1, help="Least share of the time that the device must work; in FILE too."
            ),
        ] = None,
        concurrency: Annotated[
            int, typer.Option("--concurrency", min=1, help="Clients of the load that is traced.")
        ] = 4,
        beam: Annotated[int, typer.Option("--beam", min=1, help="Beams that each request of it asks for.")] = 8,
        clients: Annotated[
            int | None,
            typer.Option(
                "--clients",
                min=1,
                help="Processes that they are in. Default: by --concurrency and the cores of this machine.",
                show_default=False,
            ),
        ] = None,
        context_tokens: Annotated[
            int | None,
            typer.Option("--context", min=1, help="Its prompts: so many random tokens. Default: histories."),
        ] = None,
        model_path: opt.ModelPath = None,
        sid_vocab_file: opt.SidVocabFile = None,
        sid: opt.Sid = None,
        sequences: opt.Sequences = None,
        url: opt.Url = None,
        quick: opt.Quick = False,
        require_gpu: opt.RequireGpu = False,
        seed: opt.Seed = 0,
        strict: opt.Strict = False,
        budget: opt.Budget = None,
        reports_dir: opt.ReportsDir = _REPORTS,
        plant: Plant = None,
    ) -> None:
        """Take a trace of the engine and judge it; or, with FILE, show that trace."""
        if file is not None:
            from flashrec_harness.tracing import picture
            from flashrec_harness.tracing.checks import Expectation
            from flashrec_harness.tracing.trim import trim as trimmed

            shown = file if trim is None else trimmed(file, trim, waves)
            expected = Expectation(server=False, fp8_gemms_per_forward=fp8_gemms, search_share=search_share, busy=busy)
            raise typer.Exit(picture.show_file(shown, html, console, expected))
        from flashrec_harness import traces

        context = make_context(model_path, sid_vocab_file, sid, sequences, url, quick, require_gpu, seed)
        processes = clients or traces.client_processes(concurrency)
        load = traces.TraceLoad(concurrency, beam, context_tokens, busy, processes)
        judge_with(
            "trace", context, reports_dir, strict=strict, budget=budget, function=lambda ctx: traces.run(ctx, load)
        )
