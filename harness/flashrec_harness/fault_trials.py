"""Trials of the harness: every planted fault against the suite that must see it, and the clean engine against all.

Each runs the suite's own command, in its quick form, in a process of its own and reads the report that it wrote.
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flashrec_harness import hardware
from flashrec_harness.children import last_error, package_path
from flashrec_harness.outcome import Check, Outcome, count
from flashrec_harness.planting import PLANT_VARIABLE
from flashrec_harness.report.model import load
from flashrec_harness.sglang_env import NO_SGLANG, PYTHON_VARIABLE, SglangUnavailableError, named_url, sglang_python

if TYPE_CHECKING:
    from flashrec_harness.faults import Catch, Fault

SUITE = "faults"
SUITES = ("kernel", "parity", "determinism", "perf", "trace", "soak", "overload")
SIDE_BY_SIDE = ("parity", "determinism", "kernel", "trace")
"""Longest first, one for each core at a time. Without a GPU no verdict of theirs depends on a neighbour."""
_TIMEOUT_S = 1200.0
_POLL_S = 0.1
_RED = (Outcome.FAIL, Outcome.INVALID, Outcome.INCONCLUSIVE)


@dataclass(frozen=True, slots=True)
class Trial:
    """One fault against one suite that must see it."""

    fault: Fault
    catch: Catch

    @property
    def name(self) -> str:
        return f"{self.fault.name}, {self.catch.suite}"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What the suites judge; ``None`` for the bundled one."""

    model_path: Path | None = None
    sid_vocab_file: Path | None = None

    def arguments(self) -> list[str]:
        given = (("--model-path", self.model_path), ("--sid-vocab-file", self.sid_vocab_file))
        return [part for flag, path in given if path is not None for part in (flag, str(path))]

    def in_fp8(self, where: Path) -> Checkpoint:
        """The same with FP8 weights."""
        from flashrec_harness.checkpoints.fp8 import quantized_copy
        from flashrec_harness.targets import resolve_model

        return Checkpoint(quantized_copy(resolve_model(self.model_path), where / "fp8-checkpoint"), self.sid_vocab_file)


@dataclass(frozen=True, slots=True)
class Ran:
    """What a suite's process left behind: its checks, or why there are none; and the seconds that it took."""

    checks: Sequence[Check]
    error: str
    seconds: float
    cpu_seconds: float


def registered() -> Mapping[str, Fault]:
    """Every fault, to be listed and started in other processes: this one then runs no engine."""
    os.environ.setdefault(PLANT_VARIABLE, "")
    from flashrec_harness.faults import FAULTS

    return FAULTS


def trials(suites: Sequence[str] = SUITES, names: Sequence[str] = ()) -> list[Trial]:
    """The trials of the named faults (all of them) that ``suites`` must catch."""
    return [
        Trial(fault, catch)
        for fault in registered().values()
        for catch in fault.catches
        if (not names or fault.name in names) and catch.suite in suites
    ]


def run_trial(trial: Trial, directory: Path, checkpoint: Checkpoint) -> Check:
    """*pass*: caught, *fail*: missed, *not run*: it takes a GPU, *invalid*: the suite did not come to its verdict."""
    fault, catch = trial.fault, trial.catch
    if catch.gpu and not hardware.has_gpu():
        reason = f"only a GPU's trace shows it; {hardware.missing_gpu_reason()}"
        return Check(SUITE, trial.name, Outcome.NOT_RUN, f"to be seen by: {catch.check}", reason=reason)
    where = directory / f"{fault.name}-{catch.suite}"
    command = _simulated(trial, where) if catch.module else _suite_command(catch.suite, where, checkpoint, trial)
    ran, repeat = _run(command, where, planted=fault.name), _shown(command)
    if ran.error:
        reason = f"the suite did not come to a verdict: {ran.error}"
        return Check(SUITE, trial.name, Outcome.INVALID, "", reason=reason, repeat=repeat, seconds=ran.seconds)
    seen = [check for check in ran.checks if catch.check in check.name and check.outcome is catch.outcome]
    if seen:
        summary = f"{seen[0].name}: {seen[0].outcome}: {seen[0].reason}"
        return Check(SUITE, trial.name, Outcome.PASS, summary, seconds=ran.seconds, repeat=repeat)
    found = {check.name: check.outcome for check in ran.checks if catch.check in check.name}
    reason = f"missed: {', '.join(f'{name} is {outcome}' for name, outcome in found.items()) or 'no such check'}"
    return Check(SUITE, trial.name, Outcome.FAIL, f"expected {catch.outcome} of {catch.check}", reason, repeat=repeat)


@dataclass(frozen=True, slots=True)
class CleanRun:
    """One run of a suite on the engine as it is; ``red`` names what was not a pass although it ran.

    ``cpu_seconds`` is the time that its processes computed: what ``seconds`` would hardly go below on a quiet core.
    """

    suite: str
    counts: Mapping[Outcome, int]
    red: tuple[str, ...]
    seconds: float
    cpu_seconds: float


def run_clean(suite: str, where: Path, checkpoint: Checkpoint) -> CleanRun:
    """The quick form of a suite, nothing planted."""
    ran = _run(_suite_command(suite, where, checkpoint), where)
    red = [f"{check.name}: {check.outcome}: {check.reason}" for check in ran.checks if check.outcome in _RED]
    red += [ran.error] * bool(ran.error)
    return CleanRun(suite, count(ran.checks), tuple(red), ran.seconds, ran.cpu_seconds)


def judge_clean(runs: Sequence[CleanRun]) -> Check:
    """All clean runs of one suite: none may be red."""
    red = [run for run in runs if run.red]
    passed, absent = runs[-1].counts[Outcome.PASS], runs[-1].counts[Outcome.NOT_RUN]
    times = [run.seconds for run in runs]
    nothing = not any(run.counts[Outcome.PASS] for run in runs)
    return Check(
        SUITE,
        f"clean engine, {runs[0].suite}",
        Outcome.FAIL if red else Outcome.INVALID if nothing else Outcome.PASS,
        f"{len(runs) - len(red)} of {len(runs)} runs without a red; {passed} checks pass, {absent} not run; "
        f"{statistics.median(times):.0f} s (median), {max(times):.0f} s at most",
        reason=red[0].red[0] if red else "nothing passed" if nothing else "",
        data={"runs": len(runs), "red": len(red), "seconds": times},
    )


def _suite_command(suite: str, where: Path, checkpoint: Checkpoint, trial: Trial | None = None) -> list[str]:
    command = [sys.executable, "-m", "flashrec_harness", suite, "--quick", "--reports-dir", str(where)]
    if trial is None:
        return [*command, *checkpoint.arguments()]
    command += ["--only", trial.catch.only] if trial.catch.only else []
    command += ["--beam", "4", "--concurrency", "1"] if suite == "perf" else []
    command += ["--plant", trial.fault.name]
    return [*command, *(checkpoint.in_fp8(where) if trial.catch.fp8 else checkpoint).arguments()]


def _simulated(trial: Trial, where: Path) -> list[str]:
    return [sys.executable, "-m", trial.catch.module, str(where), str(where / "checks.json")]


def _run(command: Sequence[str], where: Path, planted: str = "") -> Ran:
    """Run a suite's process to its end and read what it reported."""
    where.mkdir(parents=True, exist_ok=True)
    environment = {key: value for key, value in os.environ.items() if key != PLANT_VARIABLE}
    environment |= {PLANT_VARIABLE: planted} if planted else {}
    environment |= {"PYTHONPATH": package_path(), **_without_sglang()}
    environment.setdefault("OMP_NUM_THREADS", "1")
    log, started = where / "output.txt", time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        cpu_seconds = _await(process)
    checks, error = _reported(where, log, process.returncode)
    return Ran(checks, error, time.monotonic() - started, cpu_seconds)


def _await(process: subprocess.Popen[bytes]) -> float:
    """Wait for a process, or end it when its time is up; the seconds that it and its children computed."""
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        found, status, usage = os.wait4(process.pid, os.WNOHANG)
        if found:
            process.returncode = os.waitstatus_to_exitcode(status)
            return usage.ru_utime + usage.ru_stime
        if time.monotonic() > deadline:
            process.terminate()
            deadline += _TIMEOUT_S
        time.sleep(_POLL_S)


def _reported(where: Path, log: Path, code: int) -> tuple[list[Check], str]:
    """The checks that a process wrote; else why there are none."""
    plain, report = where / "checks.json", where / "latest" / "results.json"
    if plain.is_file():
        return [_check(body) for body in json.loads(plain.read_text(encoding="utf-8"))], ""
    if report.is_file():
        return [check for checks in load(report).suites.values() for check in checks], ""
    return [], f"exit code {code}: {last_error(log.read_text('utf-8', 'replace'))}"


def _check(body: Mapping[str, str]) -> Check:
    return Check(body["suite"], body["name"], Outcome(body["outcome"]), body["summary"], body["reason"])


def _without_sglang() -> dict[str, str]:
    """Judge without SGLang where it is not installed: a trial is no reason to install it."""
    if named_url() is not None:
        return {}
    try:
        sglang_python(create=False)
    except SglangUnavailableError:
        return {PYTHON_VARIABLE: NO_SGLANG}
    return {}


def _shown(command: Sequence[str]) -> str:
    """A command for people: without this interpreter's path and the directory of one run."""
    shown = ["python", *command[1:]]
    if "--reports-dir" in shown:
        at = shown.index("--reports-dir")
        del shown[at : at + 2]
    return shlex.join(shown)
