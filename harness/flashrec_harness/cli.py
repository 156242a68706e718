"""``flashrec-harness``: judge a checkpoint, keep baselines, read reports.

Exit codes (SPEC H2): 0 nothing failed, 1 a failure, 2 usage, 4 invalid or inconclusive; ``--strict`` makes
"not run" a failure. 130: interrupted, and nothing had failed by then.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from flashrec.command_line import make_app
from flashrec.console import make_console
from flashrec.errors import ConfigError, FlashRecError
from flashrec_harness import bisect_command, reading_commands, serving_commands, trace_command, trend_command
from flashrec_harness import options as opt
from flashrec_harness.baseline_commands import app as baseline_app
from flashrec_harness.catalogs import command as catalogs_command
from flashrec_harness.checkpoints.cli import command as make_checkpoint
from flashrec_harness.evaluation import command as evaluation_command
from flashrec_harness.faults_command import command as faults_command
from flashrec_harness.golden_commands import app as golden_app
from flashrec_harness.hardware import DeviceBusyError, device_lock
from flashrec_harness.outcome import Check, ExitCode, SuiteContext, SuiteFn, exit_code
from flashrec_harness.planting import Plant
from flashrec_harness.report import terminal
from flashrec_harness.runner import Session
from flashrec_harness.targets import resolve_catalog, resolve_model

app = make_app("flashrec-harness", "Decides, with evidence, whether an engine is right, reproducible and fast.")
_console = make_console()
_REPORTS = Path("reports")
_BASELINES = Path("baselines")
_INTERRUPTED = 130
"""As shells have it: 128 and the number of SIGINT."""


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
    only: str | None = None,
) -> SuiteContext:
    model = resolve_model(model_path)
    for flag, path in (
        ("--model-path", model),
        ("--sid-vocab-file", sid_vocab_file),
        ("--sequences", sequences),
    ):
        if path is not None and not path.exists():
            raise typer.BadParameter(f"{path} does not exist", param_hint=flag)
    if not model.is_dir():
        raise typer.BadParameter(f"{model} is no directory", param_hint="--model-path")
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
        only=only,
    )


def _command_line() -> str:
    return shlex.join(["python", "-m", "flashrec_harness", *sys.argv[1:]])


def _conclude(session: Session, suites: dict[str, list[Check]], lines: list[Check], *, strict: bool) -> None:
    report, directory = session.finish(suites, lines)
    terminal.show(report, _console, directory=directory)
    code: int = exit_code(report.judged, strict=strict)
    raise typer.Exit(_INTERRUPTED if session.interrupted and code != ExitCode.FAILED else code)


def _one_suite(
    suite: str,
    context: SuiteContext,
    reports_dir: Path,
    *,
    strict: bool,
    budget: float | None = None,
    function: SuiteFn | None = None,
) -> None:
    with device_lock():
        session = Session.start(context, title=suite, command=_command_line(), root=reports_dir, budget_minutes=budget)
        checks = session.run(suite, function)
    _conclude(session, {suite: checks}, [], strict=strict)


@app.command()
def accept(
    model_path: opt.ModelPath = None,
    sid_vocab_file: opt.SidVocabFile = None,
    sid: opt.Sid = None,
    sequences: opt.Sequences = None,
    quick: opt.Quick = False,
    without: Annotated[
        list[str] | None, typer.Option("--without", help="Leave a suite out, which is then not run. Repeatable.")
    ] = None,
    require_gpu: opt.RequireGpu = False,
    seed: opt.Seed = 0,
    strict: opt.Strict = False,
    budget: opt.Budget = None,
    reports_dir: opt.ReportsDir = _REPORTS,
    plant: Plant = None,
) -> None:
    """Run the acceptance list for one checkpoint; without arguments, for the bundled one."""
    from flashrec_harness import acceptance

    unknown = [name for name in without or () if name not in acceptance.ORDER]
    if unknown:
        raise ConfigError(f"--without {unknown[0]}: name one of {', '.join(acceptance.ORDER)}")
    context = _context(model_path, sid_vocab_file, sid, sequences, None, quick, require_gpu, seed)
    with device_lock():
        session = Session.start(
            context, title="accept", command=_command_line(), root=reports_dir, budget_minutes=budget
        )
        suites, lines = acceptance.run(session, without=without or (), announce=_console.print)
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
        budget: opt.Budget = None,
        reports_dir: opt.ReportsDir = _REPORTS,
        only: opt.Only = None,
        plant: Plant = None,
    ) -> None:
        if suite == "kernel" and url is not None:
            raise ConfigError("--url: kernels are judged in this process; run `kernel` on the server's machine")
        context = _context(model_path, sid_vocab_file, sid, sequences, url, quick, require_gpu, seed, only=only)
        _one_suite(suite, context, reports_dir, strict=strict, budget=budget)

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
    candidate: Annotated[
        str | None,
        typer.Option("--candidate", help="With --against: the newer revision. Default: the working tree as it is."),
    ] = None,
    quick: opt.Quick = False,
    require_gpu: opt.RequireGpu = False,
    seed: opt.Seed = 0,
    strict: opt.Strict = False,
    budget: opt.Budget = None,
    baselines_dir: opt.BaselinesDir = _BASELINES,
    reports_dir: opt.ReportsDir = _REPORTS,
    plant: Plant = None,
) -> None:
    """Measure a workload and compare it with its stored baseline."""
    from flashrec_harness.perf import suite

    if seed:
        raise ConfigError("perf: --seed: a workload has a seed of its own; a copy of its file may have another")
    if quick and workload not in (None, "quick"):
        raise ConfigError(f"perf: --quick is the workload quick; leave it out to measure {workload}")
    context = _context(model_path, sid_vocab_file, sid, sequences, url, quick, require_gpu, seed, workload=workload)
    settings = suite.PerfSettings(
        baselines=baselines_dir,
        beam=beam,
        concurrency=concurrency,
        reports=reports_dir,
        against=against,
        candidate=candidate,
    )
    if update_baseline and not reason:
        raise ConfigError('--update-baseline: say why with --reason "..."; the file keeps it')
    update = suite.UpdateRequest(reason, accept_wider) if update_baseline else None
    _one_suite(
        "perf",
        context,
        reports_dir,
        strict=strict,
        budget=budget,
        function=lambda ctx: suite.run(ctx, settings, update),
    )


app.add_typer(baseline_app)
app.add_typer(golden_app)
for _command in (reading_commands.show, reading_commands.compare, reading_commands.repro):
    app.command()(_command)
app.command("make-checkpoint")(make_checkpoint)
serving_commands.add_to(app, _context, _one_suite)
evaluation_command.add_to(app, _context, _one_suite)
catalogs_command.add_to(app, _context, _one_suite)
trace_command.add_to(app, _context, _one_suite)
app.command("trend")(trend_command.command)
app.command("bisect", context_settings=bisect_command.CONTEXT)(bisect_command.command)
app.command("faults")(faults_command)


def main(arguments: list[str] | None = None) -> None:
    """Entry point: a user's error is one line and exit code 2."""
    try:
        app(args=arguments)
    except (FlashRecError, DeviceBusyError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(ExitCode.USAGE) from None
