"""The perf suite: measure, store the session, compare with the baseline, and write one where asked to."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from flashrec.errors import ConfigError
from flashrec_harness import baselines, environment, hardware
from flashrec_harness.baselines import Baseline, BaselineError, MeasuredSession
from flashrec_harness.environment import Environment
from flashrec_harness.http_client import Client
from flashrec_harness.outcome import Check, Outcome, SuiteContext
from flashrec_harness.perf import gathered, history, judge, matrix, published, sweep
from flashrec_harness.perf.measure import Measurement, RunTask, measure, run_in_child, yardsticks_of
from flashrec_harness.perf.server_keys import of_server, untold
from flashrec_harness.perf.workload import QUICK, Workload, load_workload
from flashrec_harness.planting import planted_names
from flashrec_harness.runner import repeat_command
from flashrec_harness.servers import processes_behind
from flashrec_harness.targets import display_path

BASELINES = Path("baselines")
"""Where baselines lie unless said otherwise."""
_TREND_FROM = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PerfSettings:
    """Where baselines and reports lie, and how the workload is narrowed.

    ``against`` is a git revision to decide against by paired rounds, ``candidate`` what is decided (default:
    the working tree); ``run`` measures one task.
    """

    baselines: Path = BASELINES
    reports: Path = Path("reports")
    beam: int | None = None
    concurrency: int | None = None
    against: str | None = None
    candidate: str | None = None
    run: RunTask = run_in_child

    @property
    def flags(self) -> list[str]:
        """The command line's options that choose what is judged."""
        options = (("beam", self.beam), ("concurrency", self.concurrency))
        revisions = (("against", self.against), ("candidate", self.candidate))
        places = (("baselines-dir", None if self.baselines == BASELINES else display_path(self.baselines)),)
        return [word for name, value in (*options, *revisions, *places) if value for word in (f"--{name}", str(value))]


@dataclass(frozen=True, slots=True)
class UpdateRequest:
    """``--update-baseline`` with its reason."""

    reason: str
    accept_wider: bool = False


def run(
    context: SuiteContext, settings: PerfSettings | None = None, update: UpdateRequest | None = None
) -> list[Check]:
    """Judge a workload, and name the command that judges the same cells against the same commit again.

    Raises what :func:`judge_workload` raises.
    """
    settings = settings or PerfSettings()
    checks = judge_workload(context, settings, update)
    for check in checks:
        check.repeat = shlex.join([*shlex.split(repeat_command("perf", context)), *settings.flags])
    return checks


def judge_workload(context: SuiteContext, settings: PerfSettings, update: UpdateRequest | None) -> list[Check]:
    """Measure ``context.workload`` (default ``quick``) and judge it against its stored baseline.

    Raises :class:`~flashrec.errors.ConfigError` for an unknown workload or an address of no server, and
    :class:`~flashrec_harness.baselines.BaselineError` where ``update`` may not write.
    """
    if settings.against is None and settings.candidate is not None:
        raise ConfigError("--candidate names what is decided; --against REV names what it is decided against")
    if settings.against is not None and update is not None:
        raise ConfigError("--update-baseline stores plain sessions: run it without --against")
    if context.url is not None:
        Client(context.url)  # or says that load cannot be sent there
    workload = load_workload(context.workload or QUICK).narrowed(settings.beam, settings.concurrency)
    if settings.against is not None:
        from flashrec_harness.perf import against

        return against.run(context, replace(workload, sweep=None), settings.against, settings.candidate)
    foreign_before = hardware.foreign_processes(processes_behind(context.url) if context.url is not None else ())
    measurement = measure(context, workload, yardsticks=yardsticks_of(context, workload), run=settings.run)
    where = measured_environment(context, workload, measurement)
    session = measurement.session(
        run_id=context.out_dir.parent.name, commit=where.commit.sha, boot_id=environment.boot_id()
    )
    valid = judge.validity(measurement, workload, foreign_before, one_server=context.url is not None)
    sound = valid.outcome is Outcome.PASS and not planted_names()
    keep_session(context.out_dir, workload, where, session, valid=sound)
    checks = [valid, *(judge.figures(cell, measurement, session) for cell in workload.cells)]
    _add_trends(checks[1:], settings, workload, where)
    checks += published.check(workload, session.samples, where.hard["device"])
    checks += matrix.check(workload, session.samples)
    checks += sweep.check([process.sweep for process in measurement.engine], workload)
    checks += [judge.resources(measurement), *_compare(settings.baselines, workload, where, session, valid)]
    if update is not None:
        missing = untold(measurement.engine[0].configuration) if context.url is not None else []
        checks.append(_update(settings, workload, where, update, valid, missing))
    return checks


def _add_trends(figures: list[Check], settings: PerfSettings, workload: Workload, where: Environment) -> None:
    """Put each cell's throughput over the comparable stored sessions beside its figures, once there are three."""
    every = history.sessions_of(workload.name, settings.reports, settings.baselines)
    past = history.comparable(every, where.hard)
    if len(past) < _TREND_FROM:
        return
    by_cell = {trend.cell: trend for trend in history.trends(past, ["throughput"])}
    for check in figures:
        trend = by_cell[check.data["cell"]]
        check.plots.append(trend.plot())
        check.summary += f"; over commits: {history.describe(trend)}"


def measured_environment(context: SuiteContext, workload: Workload, measurement: Measurement) -> Environment:
    """The environment with everything that makes two measurements of a workload comparable as hard keys.

    Of a server, its device, flags and catalog take the place of this machine's.
    """
    digests = measurement.engine[0].prompts
    prompts = {f"cell {index} prompts": digests[cell.name] for index, cell in enumerate(workload.cells)}
    hard = workload.fingerprint() | prompts | {"entry": "http" if context.url else "in process"}
    where = environment.collect(model_path=context.model_path, sid_vocab_file=context.sid_vocab_file, hard=hard)
    if context.url is not None:
        where.hard = of_server(where.hard, measurement.engine[0].configuration, context.url)
    return where


def keep_session(
    directory: Path, workload: Workload, where: Environment, session: MeasuredSession, *, valid: bool
) -> None:
    """Store the session beside its report: baselines are made from these files."""
    body = {
        "workload": workload.name,
        "environment": where.as_json(),
        "session": asdict(session),
        "valid": valid,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / history.SESSION_FILE).write_text(json.dumps(body, indent=1, sort_keys=True), encoding="utf-8")


def _compare(
    directory: Path, workload: Workload, where: Environment, session: MeasuredSession, valid: Check
) -> list[Check]:
    name = "against baseline"
    path = baselines.path_for(directory, where.hard["device"], workload.name)
    if valid.outcome is not Outcome.PASS:
        return [Check("perf", name, Outcome.NOT_RUN, "", reason="the measurement is not valid")]
    if not path.is_file():
        device = where.hard["device"]
        others = baselines.devices(directory, workload.name)
        elsewhere = f"; device: baseline {', '.join(others)}, this run {device!r}" if others else ""
        return [
            Check(
                "perf",
                name,
                Outcome.NOT_RUN,
                f"the figures above are recorded; {baselines.MIN_SESSIONS} sessions make a baseline",
                reason=f"no baseline for this device ({device}, workload {workload.name}){elsewhere}",
            )
        ]
    try:
        baseline = baselines.load(path)
    except BaselineError as error:
        return [Check("perf", name, Outcome.INVALID, "nothing was compared", reason=str(error))]
    refusal = baseline.refusal(where.hard)
    if refusal:
        return [
            Check(
                "perf",
                name,
                Outcome.NOT_RUN,
                f"nothing was compared with {path}; measure what it holds, or give this workload a name of its own",
                reason=f"comparison refused: {refusal}",
                data={"refused": refusal},
            )
        ]
    return judge.against_baseline(session, baseline, baseline.soft_differences(where.soft))


def _update(
    settings: PerfSettings,
    workload: Workload,
    where: Environment,
    request: UpdateRequest,
    valid: Check,
    untold_by_server: Sequence[str],
) -> Check:
    sessions = gathered.stored_sessions(settings.reports, workload.name, where.hard, where.commit.sha)
    path = baselines.path_for(settings.baselines, where.hard["device"], workload.name)
    fresh = Baseline(workload.name, where.hard, where.soft, where.info, sessions)
    try:
        if valid.outcome is not Outcome.PASS:
            raise BaselineError("baseline not written: this run is not valid")
        if planted_names():
            raise BaselineError(f"baseline not written: this run carries {', '.join(planted_names())} on purpose")
        if untold_by_server:
            raise BaselineError(
                f"baseline not written: the server's /server_info lacks {', '.join(untold_by_server)}, so what was "
                "measured cannot be told from another server's; measure a flashrec server of this version"
            )
        changes = baselines.update(
            path, fresh, commit=where.commit, reason=request.reason, accept_wider=request.accept_wider
        )
    except BaselineError as error:
        return Check("perf", "baseline written", Outcome.FAIL, "nothing was changed", reason=str(error))
    return Check(
        "perf",
        "baseline written",
        Outcome.PASS,
        f"{path}: {len(sessions)} sessions; {request.reason}",
        rows=[{"change": line} for line in changes],
    )
