"""The perf suite: measure, store the session, compare with the baseline, and write one where asked to."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flashrec_harness import baselines, environment, hardware
from flashrec_harness.baselines import Baseline, BaselineError, MeasuredSession
from flashrec_harness.environment import Environment
from flashrec_harness.outcome import Check, Outcome, SuiteContext
from flashrec_harness.perf import judge
from flashrec_harness.perf.measure import Measurement, RunTask, measure, run_in_child
from flashrec_harness.perf.workload import QUICK, Workload, load_workload

_SESSION_FILE = "session.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PerfSettings:
    """Where baselines and reports lie, and how the workload is narrowed.

    ``against`` is a git revision to decide against by paired rounds; ``run`` measures one task.
    """

    baselines: Path = Path("baselines")
    reports: Path = Path("reports")
    beam: int | None = None
    concurrency: int | None = None
    against: str | None = None
    run: RunTask = run_in_child


@dataclass(frozen=True, slots=True)
class UpdateRequest:
    """``--update-baseline`` with its reason."""

    reason: str
    accept_wider: bool = False


def run(
    context: SuiteContext, settings: PerfSettings | None = None, update: UpdateRequest | None = None
) -> list[Check]:
    """Measure ``context.workload`` (default ``quick``) and judge it against its stored baseline.

    Raises :class:`~flashrec.errors.ConfigError` for an unknown workload and
    :class:`~flashrec_harness.baselines.BaselineError` where ``update`` may not write.
    """
    settings = settings or PerfSettings()
    workload = load_workload(context.workload or QUICK).narrowed(settings.beam, settings.concurrency)
    if settings.against is not None:
        from flashrec_harness.perf.paired import run_paired

        return run_paired(context, workload, settings.against)
    foreign_before = hardware.foreign_processes()
    with_yardstick = workload.reference_requests > 0 and context.sid_vocab_file is not None
    measurement = measure(context, workload, reference=with_yardstick, run=settings.run)
    where = measured_environment(context, workload, measurement)
    session = measurement.session(
        run_id=context.out_dir.parent.name, commit=where.commit.sha, boot_id=environment.boot_id()
    )
    valid = judge.validity(measurement, workload, foreign_before, one_server=context.url is not None)
    keep_session(context.out_dir, workload, where, session, valid=valid.outcome is Outcome.PASS)
    checks = [valid, *(judge.figures(cell, measurement, session) for cell in workload.cells)]
    checks += [judge.resources(measurement), *_compare(settings.baselines, workload, where, session, valid)]
    if update is not None:
        checks.append(_update(settings, workload, where, update, valid))
    return checks


def measured_environment(context: SuiteContext, workload: Workload, measurement: Measurement) -> Environment:
    """The environment with everything that makes two measurements of a workload comparable as hard keys."""
    prompts = {f"prompts {cell}": digest for cell, digest in measurement.engine[0].prompts.items()}
    hard = workload.fingerprint() | prompts | {"entry": "http" if context.url else "in process"}
    return environment.collect(model_path=context.model_path, sid_vocab_file=context.sid_vocab_file, hard=hard)


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
    (directory / _SESSION_FILE).write_text(json.dumps(body, indent=1, sort_keys=True), encoding="utf-8")


def stored_sessions(reports: Path, workload: str, hard: dict[str, Any], commit: str) -> list[MeasuredSession]:
    """Valid sessions below ``reports`` of the same workload, hard environment and commit, oldest first."""
    found = []
    for path in sorted(reports.glob(f"*/perf/{_SESSION_FILE}")):
        if path.parent.parent.is_symlink():
            continue
        body = json.loads(path.read_text(encoding="utf-8"))
        same = body["workload"] == workload and body["environment"]["hard"] == json.loads(json.dumps(hard))
        if body["valid"] and same and body["session"]["commit"] == commit:
            found.append(MeasuredSession(**body["session"]))
    return found


def _compare(
    directory: Path, workload: Workload, where: Environment, session: MeasuredSession, valid: Check
) -> list[Check]:
    name = "against baseline"
    path = baselines.path_for(directory, where.hard["device"], workload.name)
    if valid.outcome is not Outcome.PASS:
        return [Check("perf", name, Outcome.NOT_RUN, "", reason="the measurement is not valid")]
    if not path.is_file():
        return [
            Check(
                "perf",
                name,
                Outcome.NOT_RUN,
                f"the figures above are recorded; {baselines.MIN_SESSIONS} sessions make a baseline",
                reason=f"no baseline for this device ({where.hard['device']}, workload {workload.name})",
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
                "not comparable: a hard key of the environment differs",
                reason=f"comparison refused: {refusal}",
                data={"refused": refusal},
            )
        ]
    return judge.against_baseline(session, baseline, baseline.soft_differences(where.soft))


def _update(
    settings: PerfSettings, workload: Workload, where: Environment, request: UpdateRequest, valid: Check
) -> Check:
    sessions = stored_sessions(settings.reports, workload.name, where.hard, where.commit.sha)
    path = baselines.path_for(settings.baselines, where.hard["device"], workload.name)
    fresh = Baseline(workload.name, where.hard, where.soft, where.info, sessions)
    try:
        if valid.outcome is not Outcome.PASS:
            raise BaselineError("baseline not written: this run is not valid")
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
