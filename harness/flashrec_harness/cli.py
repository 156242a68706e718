"""``flashrec-harness``: judge a checkpoint, keep baselines, read reports.

Exit codes (SPEC H2): 0 nothing failed, 1 a failure, 2 usage, 4 invalid or inconclusive; ``--strict`` makes
"not run" a failure.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flashrec.errors import FlashRecError
from flashrec_harness import options as opt
from flashrec_harness.baseline_commands import app as baseline_app
from flashrec_harness.checkpoints.cli import command as make_checkpoint
from flashrec_harness.hardware import DeviceBusyError, device_lock
from flashrec_harness.outcome import Check, ExitCode, SuiteContext, SuiteFn, exit_code
from flashrec_harness.planting import Plant
from flashrec_harness.report import terminal
from flashrec_harness.report.model import load
from flashrec_harness.runner import Session
from flashrec_harness.targets import resolve_catalog, resolve_model

app = typer.Typer(
    name="flashrec-harness",
    help="Decides, with evidence, whether an engine is right, reproducible and fast.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_console = Console()
_REPORTS = Path("reports")
_BASELINES = Path("baselines")


def _context(
    model_path: Path | None,
    sid_vocab_file: Path | None,
    sid: str | None,
    sequences: Path | None,
    url: str | None,
    quick: bool,
    require_gpu: bool,
    seed: int,
    workload: str | None = None,
) -> SuiteContext:
    model = resolve_model(model_path)
    for flag, path in (
        ("--model-path", model),
        ("--sid-vocab-file", sid_vocab_file),
        ("--sequences", sequences),
    ):
        if path is not None and not path.exists():
            raise typer.BadParameter(f"{path} does not exist", param_hint=flag)
    return SuiteContext(
        model_path=model,
        sid_vocab_file=resolve_catalog(model, sid_vocab_file),
        sid=sid,
        sequences=sequences,
        url=url,
        quick=quick,
        require_gpu=require_gpu,
        seed=seed,
        workload=workload,
    )


def _command_line() -> str:
    return shlex.join(["python", "-m", "flashrec_harness", *sys.argv[1:]])


def _conclude(session: Session, suites: dict[str, list[Check]], lines: list[Check], *, strict: bool) -> None:
    report, directory = session.finish(suites, lines)
    terminal.show(report, _console, directory=directory)
    raise typer.Exit(exit_code(report.judged, strict=strict))


def _one_suite(
    suite: str, context: SuiteContext, reports_dir: Path, *, strict: bool, function: SuiteFn | None = None
) -> None:
    with device_lock():
        session = Session.start(context, title=suite, command=_command_line(), root=reports_dir)
        checks = session.run(suite, function)
    _conclude(session, {suite: checks}, [], strict=strict)


@app.command()
def accept(
    model_path: opt.ModelPath = None,
    sid_vocab_file: opt.SidVocabFile = None,
    sid: opt.Sid = None,
    sequences: opt.Sequences = None,
    quick: opt.Quick = False,
    require_gpu: opt.RequireGpu = False,
    seed: opt.Seed = 0,
    strict: opt.Strict = False,
    reports_dir: opt.ReportsDir = _REPORTS,
) -> None:
    """Run the acceptance list for one checkpoint; without arguments, for the bundled one."""
    from flashrec_harness import acceptance

    context = _context(model_path, sid_vocab_file, sid, sequences, None, quick, require_gpu, seed)
    with device_lock():
        session = Session.start(context, title="accept", command=_command_line(), root=reports_dir)
        suites, lines = acceptance.run(session, announce=_console.print)
    _conclude(session, suites, lines, strict=strict)


def _suite_command(suite: str, doc: str) -> None:
    def command(
        model_path: opt.ModelPath = None,
        sid_vocab_file: opt.SidVocabFile = None,
        sid: opt.Sid = None,
        sequences: opt.Sequences = None,
        url: opt.Url = None,
        quick: opt.Quick = False,
        require_gpu: opt.RequireGpu = False,
        seed: opt.Seed = 0,
        strict: opt.Strict = False,
        reports_dir: opt.ReportsDir = _REPORTS,
        plant: Plant = None,
    ) -> None:
        context = _context(model_path, sid_vocab_file, sid, sequences, url, quick, require_gpu, seed)
        _one_suite(suite, context, reports_dir, strict=strict)

    app.command(suite, help=doc)(command)


_suite_command("kernel", "Every device kernel equals its reference.")
_suite_command("parity", "The same choices and scores as SGLang, transformers and the oracle.")
_suite_command("determinism", "The same bits at temperature 0, N >= 120, across processes.")


@app.command()
def perf(
    model_path: opt.ModelPath = None,
    sid_vocab_file: opt.SidVocabFile = None,
    sid: opt.Sid = None,
    sequences: opt.Sequences = None,
    url: opt.Url = None,
    workload: Annotated[
        str | None, typer.Option("--workload", help="A workload's name or its JSON file. Default: quick.")
    ] = None,
    beam: Annotated[int | None, typer.Option("--beam", min=1, help="One cell: this many beams.")] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", min=1, help="One cell: this many requests at once.")
    ] = None,
    update_baseline: Annotated[
        bool, typer.Option("--update-baseline", help="Write the baseline from the stored sessions.")
    ] = False,
    reason: Annotated[str, typer.Option("--reason", help="Why the baseline changes; kept in its file.")] = "",
    accept_wider: Annotated[
        bool, typer.Option("--accept-wider", help="Allow a baseline with a wider noise band.")
    ] = False,
    against: Annotated[
        str | None,
        typer.Option("--against", help="Decide against a git revision: paired, interleaved ABBA rounds."),
    ] = None,
    quick: opt.Quick = False,
    require_gpu: opt.RequireGpu = False,
    seed: opt.Seed = 0,
    strict: opt.Strict = False,
    baselines_dir: opt.BaselinesDir = _BASELINES,
    reports_dir: opt.ReportsDir = _REPORTS,
) -> None:
    """Measure a workload and compare it with its stored baseline."""
    from flashrec_harness.perf import suite

    context = _context(model_path, sid_vocab_file, sid, sequences, url, quick, require_gpu, seed, workload=workload)
    settings = suite.PerfSettings(
        baselines=baselines_dir, beam=beam, concurrency=concurrency, reports=reports_dir, against=against
    )
    update = suite.UpdateRequest(reason, accept_wider) if update_baseline else None
    _one_suite("perf", context, reports_dir, strict=strict, function=lambda ctx: suite.run(ctx, settings, update))


@app.command()
def trace(
    file: Annotated[
        Path | None, typer.Argument(help="A Chrome trace (.json or .json.gz) to read.", exists=True)
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Where the picture goes. Default: beside the trace.")
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
    reports_dir: opt.ReportsDir = _REPORTS,
) -> None:
    """Take a trace of the engine and judge it; or, with FILE, show that trace."""
    if file is not None:
        from flashrec_harness.tracing import picture

        raise typer.Exit(picture.show_file(file, html, _console))
    context = _context(model_path, sid_vocab_file, sid, sequences, url, quick, require_gpu, seed)
    _one_suite("trace", context, reports_dir, strict=strict)


@app.command()
def show(
    run: Annotated[Path, typer.Argument(help="A run's directory or results.json.")] = _REPORTS / "latest",
) -> None:
    """Print a report in the terminal."""
    report = load(run)
    terminal.show(report, _console, directory=run if run.is_dir() else run.parent)
    raise typer.Exit(exit_code(report.judged))


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="The older run.")],
    after: Annotated[Path, typer.Argument(help="The newer run.")],
) -> None:
    """What changed between two runs: environment, outcomes, figures."""
    from flashrec_harness.report import comparison

    raise typer.Exit(comparison.show(load(before), load(after), _console))


@app.command(name="eval")
def evaluate(
    model_path: opt.ModelPath = None,
    sid_vocab_file: opt.SidVocabFile = None,
    sid: opt.Sid = None,
    sequences: opt.Sequences = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Recommendations per user.")] = 10,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only the first users.")] = None,
) -> None:
    """HR@k and NDCG@k on held-out histories, and the rates of invalid and duplicate answers."""
    from flashrec_harness import evaluation

    context = _context(model_path, sid_vocab_file, sid, sequences, None, False, False, 0)
    found = evaluation.evaluate(context, n=n, limit=limit)
    title = f"{context.model_path.name}: {found.rows} users, n = {n}"
    _console.print(terminal.rows_table(title, evaluation.rows(found)))


@app.command()
def repro(
    file: Annotated[Path, typer.Argument(help="A bundle that a suite saved.", exists=True)],
) -> None:
    """Replay a failing request. Exit code 1 while it still differs from the reference (or from itself)."""
    from flashrec_harness import repro as bundles

    bundle = bundles.load_bundle(file)
    again = bundles.replay(bundle)
    rows = bundles.compare(bundle, again)
    _console.print(f"{bundle.suite}: {bundle.reason}", markup=False)
    _console.print(terminal.rows_table("beams", rows))
    as_then = [dict(beam) for beam in bundle.observed] == again
    _console.print(f"the bits observed then: {'the same again' if as_then else 'different now'}", markup=False)
    raise typer.Exit(ExitCode.OK if all(row["same"] for row in rows) else ExitCode.FAILED)


app.add_typer(baseline_app, name="baseline")
app.command("make-checkpoint")(make_checkpoint)


def main(arguments: list[str] | None = None) -> None:
    """Entry point: a user's error is one line and exit code 2."""
    try:
        app(args=arguments)
    except (FlashRecError, DeviceBusyError, FileNotFoundError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(ExitCode.USAGE) from None
