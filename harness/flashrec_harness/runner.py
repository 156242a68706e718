"""Runs suites and writes their report; the command line and the acceptance list both go through here."""

from __future__ import annotations

import importlib
import shlex
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from flashrec.errors import FlashRecError
from flashrec_harness import budget, dialects, environment, hardware, known_failures, planting
from flashrec_harness.known_failures import KnownFailure
from flashrec_harness.outcome import Check, Outcome, SuiteContext, SuiteFn
from flashrec_harness.report import writer
from flashrec_harness.report.model import RunReport, new_run_id
from flashrec_harness.servers import processes_behind
from flashrec_harness.targets import display_path, resolve_model

SUITE_MODULES = {
    "kernel": "flashrec_harness.kernels_suite",
    "parity": "flashrec_harness.parity.suite",
    "determinism": "flashrec_harness.determinism.suite",
    "eval": "flashrec_harness.evaluation.gate",
    "perf": "flashrec_harness.perf.suite",
    "trace": "flashrec_harness.traces",
}


def suite_function(name: str) -> SuiteFn:
    """The suite's ``run``; imported when it is needed, so that one suite's imports do not tax another."""
    run: SuiteFn = importlib.import_module(SUITE_MODULES[name]).run
    return run


def guarded(
    suite: str,
    context: SuiteContext,
    function: Callable[[SuiteContext], list[Check]],
    budget_minutes: float | None = None,
) -> list[Check]:
    """Run one suite; what it raises becomes an ``invalid`` check with the traceback in ``error.txt``.

    A suite that is stopped because ``budget_minutes`` are over is ``inconclusive``, whatever it had seen by then.
    :class:`~flashrec.errors.FlashRecError` is the user's and passes through. ``--require-gpu`` without a GPU
    fails before anything is measured. A server that lacks what the suite asks is a mistake of the command.
    """
    if context.require_gpu and not hardware.has_gpu():
        reason = f"--require-gpu: {hardware.missing_gpu_reason()}"
        return [Check(suite, "GPU present", Outcome.FAIL, "nothing was judged", reason=reason)]
    if context.url is not None:
        dialects.require(suite, context.url)
    context.out_dir.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    try:
        with planting.planted(), budget.within(budget_minutes):
            checks = [*planting.confession(suite), *function(context)]
    except budget.BudgetSpent:
        reason = f"the time budget of {budget_minutes:g} min is over; allow more (--budget), or run --quick"
        checks = [Check(suite, "time budget", Outcome.INCONCLUSIVE, "stopped before its end", reason=reason)]
    except FlashRecError:
        raise
    except Exception as error:
        log = context.out_dir / "error.txt"
        log.write_text(traceback.format_exc(), encoding="utf-8")
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        checks = [
            Check(
                suite,
                "suite completed",
                Outcome.INVALID,
                f"stopped after {time.monotonic() - started:.0f} s; traceback in {suite}/{log.name}",
                reason=reason,
            )
        ]
    return checks or [Check(suite, "suite completed", Outcome.INVALID, "the suite returned no checks")]


@dataclass(slots=True)
class Session:
    """One invocation: a run id, an environment, and a report directory per suite below ``root``."""

    context: SuiteContext
    title: str
    command: str
    root: Path
    environment: environment.Environment
    run_id: str
    started: datetime
    clock: float
    known: list[KnownFailure]
    budget_minutes: float | None = None
    interrupted: bool = False

    @classmethod
    def start(
        cls, context: SuiteContext, *, title: str, command: str, root: Path, budget_minutes: float | None = None
    ) -> Session:
        """Collect the environment, read the known failures and name the run; each suite gets ``budget_minutes``.

        Raises :class:`ConfigError` as :func:`flashrec_harness.report.writer.claim` does.
        """
        known = known_failures.load()
        where = environment.collect(model_path=context.model_path, sid_vocab_file=context.sid_vocab_file)
        where.info["other processes on the device"] = hardware.foreign_processes(
            () if context.url is None else processes_behind(context.url)
        )
        now = datetime.now(UTC)
        run_id = writer.claim(root, new_run_id(where.commit, now=now))
        return cls(
            context, title, command, root, where, run_id, now, time.monotonic(), known, budget_minutes=budget_minutes
        )

    @property
    def _device(self) -> str:
        return str(self.environment.hard["device"])

    def context_for(self, suite: str) -> SuiteContext:
        """The context of one suite: the same but for its own report directory."""
        return replace(self.context, out_dir=self.root / self.run_id / suite)

    def run(self, suite: str, function: SuiteFn | None = None) -> list[Check]:
        """Run a suite (default: the registered one), and name how to repeat each of its checks."""
        checks = guarded(suite, self.context_for(suite), function or suite_function(suite), self.budget_minutes)
        checks += known_failures.apply(self.known, suite, checks, device=self._device, today=self.started.date())
        for check in checks:
            check.repeat = check.repeat or repeat_command(suite, self.context)
        return checks

    def finish(self, suites: dict[str, list[Check]], lines: Sequence[Check] = ()) -> tuple[RunReport, Path]:
        """Write the report; returns it and its directory."""
        report = RunReport(
            run_id=self.run_id,
            title=self.title,
            command=self.command,
            started=self.started,
            seconds=time.monotonic() - self.clock,
            environment=self.environment,
            suites=suites,
            lines=list(lines),
            known=known_failures.table(self.known, suites, device=self._device, today=self.started.date()),
        )
        return report, writer.write(report, self.root)


def repeat_command(suite: str, context: SuiteContext) -> str:
    """The command line that runs ``suite`` again on the same checkpoint with the same seed.

    Paths are relative to the working directory where they lie below it; the bundled checkpoint needs none.
    """
    if suite not in SUITE_MODULES:
        return ""
    parts = ["python", "-m", "flashrec_harness", suite]
    if context.model_path != resolve_model(None):
        parts += ["--model-path", display_path(context.model_path)]
    if context.sid_vocab_file is not None and context.sid_vocab_file.parent != context.model_path:
        parts += ["--sid-vocab-file", display_path(context.sid_vocab_file)]
    if context.sequences is not None:
        parts += ["--sequences", display_path(context.sequences)]
    for flag, value in (
        ("--sid", context.sid),
        ("--url", context.url),
        ("--workload", context.workload),
        ("--only", context.only),
    ):
        parts += [flag, value] if value else []
    parts += ["--quick"] if context.quick else []
    parts += ["--require-gpu"] if context.require_gpu else []
    parts += ["--seed", str(context.seed)] if context.seed else []
    for name in planting.planted_names():
        parts += ["--plant", name]
    return shlex.join(parts)
