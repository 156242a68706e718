"""The acceptance list (SPEC H2) for one checkpoint: seven lines, in order, each resting on suites' checks."""

from __future__ import annotations

import os
import re
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashrec_harness import hardware
from flashrec_harness.children import ChildError, run_module
from flashrec_harness.outcome import PARTLY, Check, Outcome, SuiteContext, count, worst
from flashrec_harness.runner import Session

UNIT_TIMEOUT_S = 900.0
_GOLDEN = re.compile(r"^golden digests")
"""The comparison with digests stored earlier for this device: where none are, the line rests on the rest."""
_FP8 = re.compile(r"^FP8")

Pick = Callable[[dict[str, list[Check]]], list[Check]]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the list and the checks that it rests on."""

    name: str
    pick: Pick


def _suites(*names: str) -> Pick:
    return lambda suites: [
        check
        for name in names
        for check in suites[name]
        if not (check.outcome is Outcome.NOT_RUN and _GOLDEN.match(check.name))
    ]


def _trace(*, fp8: bool) -> Pick:
    return lambda suites: [check for check in suites["trace"] if bool(_FP8.match(check.name)) == fp8]


LINES = (
    Line("unit tests and kernels are green", _suites("unit", "kernel")),
    Line("choices and scores equal SGLang's, transformers' and the oracle's", _suites("parity")),
    Line("the same bits in N >= 120 runs across processes", _suites("determinism")),
    Line("decode is graph replay, the forward is GPU-bound", _trace(fp8=False)),
    Line("FP8 GEMMs are really FP8", _trace(fp8=True)),
    Line("FP8 and bf16 recommend as well as transformers", _suites("eval")),
    Line("a baseline is recorded: commit, workload, figures", _suites("perf")),
)
"""The seed's list, in its order, with the quality of what comes out beside the FP8 line."""

ORDER = ("unit", "kernel", "parity", "determinism", "eval", "trace", "perf")
"""How the suites run: cheap verdicts first, and timing last, when no trace is being flushed any more."""


def run(
    session: Session, *, without: Collection[str] = (), announce: Callable[[str], None] = lambda _: None
) -> tuple[dict[str, list[Check]], list[Check]]:
    """Run every suite but ``without``; returns the suites' checks and the list's lines.

    Interrupted from the keyboard, the suite in hand and those behind it are *not run*, what was judged before stays,
    and :attr:`Session.interrupted` is set.
    """
    suites: dict[str, list[Check]] = {}
    for name in ORDER:
        if session.interrupted or name in without:
            suites[name] = [_left_out(name, "interrupted" if session.interrupted else f"left out: --without {name}")]
            continue
        announce(f"{name} ...")
        started = time.monotonic()
        try:
            suites[name] = session.run(name, unit_tests if name == "unit" else None)
        except KeyboardInterrupt:
            session.interrupted = True
            suites[name] = [_left_out(name, f"interrupted after {time.monotonic() - started:.0f} s")]
            continue
        summary = ", ".join(f"{n} {outcome}" for outcome, n in count(suites[name]).items() if n)
        announce(f"{name}: {summary} in {time.monotonic() - started:.0f} s")
    return suites, [judge(line, suites) for line in LINES]


def _left_out(suite: str, reason: str) -> Check:
    return Check(suite, "suite", Outcome.NOT_RUN, "nothing was judged", reason=reason)


def judge(line: Line, suites: dict[str, list[Check]]) -> Check:
    """A line is as good as the gravest check it rests on."""
    checks = line.pick(suites)
    outcome = worst(check.outcome for check in checks)
    totals = count(checks)
    summary = ", ".join(f"{number} {found}" for found, number in totals.items() if number) or "no check"
    grave = [check for check in checks if check.outcome is outcome and outcome is not Outcome.PASS]
    reason = f"{grave[0].name}: {grave[0].reason or grave[0].summary}" if grave else ""
    partly = outcome is Outcome.NOT_RUN and totals[Outcome.PASS] > 0
    if partly:
        reason = f"all that could run passed; {len(grave)} of {len(checks)} could not, first {reason}"
    repeats = dict.fromkeys(check.repeat for check in grave if check.repeat)
    data = {PARTLY: True} if partly else {}
    return Check("accept", line.name, outcome, summary, reason=reason, repeat="\n".join(repeats), data=data)


def unit_test_folder(start: Path | None = None) -> Path | None:
    """``tests/unit`` of the checkout that the working directory lies in, if it does."""
    here = (start or Path.cwd()).resolve()
    for folder in (here, *here.parents):
        if (folder / "tests" / "unit").is_dir() and (folder / "pyproject.toml").is_file():
            return folder / "tests" / "unit"
    return None


def unit_tests(context: SuiteContext) -> list[Check]:
    """Run ``tests/unit`` in a process of its own; *not run* outside a checkout."""
    tests = unit_test_folder()
    if tests is None:
        reason = "no tests/unit here: run from a checkout of the repository"
        return [Check("unit", "unit tests", Outcome.NOT_RUN, "nothing was run", reason=reason)]
    report = (context.out_dir / "pytest.xml").resolve()
    arguments = [str(tests), "-q", f"--rootdir={tests.parent.parent}", f"--junitxml={report}"]
    arguments += ["-m", "not slow"] if context.quick else []
    arguments += _workers()
    error = ""
    try:
        run_module("pytest", arguments, log=context.out_dir / "pytest.log", timeout_s=UNIT_TIMEOUT_S)
    except ChildError as failure:
        error = str(failure)
    return [judge_junit(report, error, repeat=f"python -m pytest {tests.relative_to(tests.parent.parent)}")]


def _workers() -> list[str]:
    """pytest-xdist's workers, file by file; none beside a GPU, which they would share, or on one core."""
    count = min(4, len(os.sched_getaffinity(0)))
    return [] if hardware.has_gpu() or count == 1 else ["-n", str(count), "--dist", "loadfile"]


def judge_junit(report: Path, error: str, *, repeat: str) -> Check:
    """A pytest session as a check: *invalid* if it wrote no report, a failure if any test failed or none ran."""
    if not report.is_file():
        return Check("unit", "unit tests", Outcome.INVALID, "pytest wrote no report", reason=error, repeat=repeat)
    root = ET.parse(report).getroot()
    cases = list(root.iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    passed = len(cases) - len(failed) - len(skipped)
    reason = ""
    if failed:
        reason = f"{failed[0].get('classname')}.{failed[0].get('name')} failed" + _more(failed)
    elif not passed:
        reason = "no test ran"
    elif error:
        reason = error.splitlines()[0]
    return Check(
        "unit",
        "unit tests",
        Outcome.FAIL if reason else Outcome.PASS,
        f"{passed} passed, {len(failed)} failed, {len(skipped)} skipped",
        reason=reason,
        repeat=repeat,
        rows=[{"failed": f"{case.get('classname')}.{case.get('name')}"} for case in failed[:20]],
    )


def _more(failed: Sequence[ET.Element]) -> str:
    return f" and {len(failed) - 1} more" if len(failed) > 1 else ""
