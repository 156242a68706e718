"""What a suite says: five outcomes, a check with its evidence, and the context a suite runs in."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any, Literal, Protocol


class Outcome(StrEnum):
    """Only ``PASS`` is a pass: a suite that could not do its work is ``INVALID`` or ``NOT_RUN``."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"
    """Measured, but the data do not decide."""
    INVALID = "invalid"
    """The measurement broke its own rules."""
    NOT_RUN = "not run"
    KNOWN = "known failure"
    """Fails, and is listed with an owner and a date until which it may."""


_SEVERITY = (Outcome.PASS, Outcome.NOT_RUN, Outcome.KNOWN, Outcome.INCONCLUSIVE, Outcome.INVALID, Outcome.FAIL)


class ExitCode(IntEnum):
    """Exit codes of every command of the harness (SPEC H2)."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNDECIDED = 4


@dataclass(frozen=True, slots=True)
class Series:
    """One named data set of a :class:`Plot`; ``faint`` draws it behind the others."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    style: Literal["points", "line", "bars"] = "points"
    faint: bool = False


@dataclass(frozen=True, slots=True)
class Band:
    """A shaded horizontal range ``low..high`` in the plot's y unit, such as a noise band."""

    low: float
    high: float
    label: str = ""


@dataclass(frozen=True, slots=True)
class Plot:
    """A chart as data; :mod:`flashrec_harness.report.svg` draws it.

    ``x_ticks`` names the positions 0, 1, 2, ... of a categorical x axis; without it x is numeric.
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    bands: Sequence[Band] = ()
    x_ticks: Sequence[str] = ()
    log_y: bool = False


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of one figure over two settings, shaded by value; ``None`` where the pair was not measured."""

    title: str
    row_label: str
    column_label: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]


@dataclass(slots=True)
class Check:
    """One verdict with its evidence.

    ``summary`` is one line: what was compared, how many, how close, and what could not be seen.
    ``reason`` says why an outcome is not a pass. ``rows`` is a table (the first row's keys are its
    columns), ``printed`` shows it in a terminal as well, ``data`` goes into ``results.json`` as it is, ``repeat`` is
    the exact command to run again. ``bundles`` are the repro bundles of requests that went wrong.
    """

    suite: str
    name: str
    outcome: Outcome
    summary: str
    reason: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    repeat: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)
    printed: bool = False
    plots: list[Plot] = field(default_factory=list)
    grids: list[Grid] = field(default_factory=list)
    bundles: list[str] = field(default_factory=list)
    seconds: float | None = None

    @property
    def commands(self) -> list[str]:
        """How to see it again: the suite's command, then each bundle's replay."""
        repros = [f"python -m flashrec_harness repro {shlex.quote(path)}" for path in self.bundles]
        return [*([self.repeat] if self.repeat else []), *repros]


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteContext:
    """What a suite judges and where it may write.

    ``url`` names a running server to judge instead of starting one. ``out_dir`` is the suite's own report
    directory: server logs, ledgers and traces go there. ``sequences`` is a CSV of held-out histories
    (``user_id, history_item_ids, target_item_id``); without it the checkpoint's own ``test.csv`` is used.
    ``only`` narrows the suites kernel, parity and determinism: to a kernel, a kind of comparison, an axis.
    """

    model_path: Path
    sid_vocab_file: Path | None = None
    sid: str | None = None
    sequences: Path | None = None
    url: str | None = None
    quick: bool = False
    require_gpu: bool = False
    seed: int = 0
    out_dir: Path = Path("reports/adhoc")
    workload: str | None = None
    only: str | None = None


class SuiteFn(Protocol):
    """A suite: one call judges one checkpoint."""

    def __call__(self, ctx: SuiteContext, /) -> list[Check]: ...


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """The gravest of ``outcomes``; of none at all: ``NOT_RUN``, since nothing was shown."""
    return max(outcomes, key=_SEVERITY.index, default=Outcome.NOT_RUN)


def count(checks: Iterable[Check]) -> dict[Outcome, int]:
    """How many checks have each outcome, every outcome present."""
    totals = dict.fromkeys(Outcome, 0)
    for check in checks:
        totals[check.outcome] += 1
    return totals


def exit_code(checks: Sequence[Check], *, strict: bool = False) -> ExitCode:
    """0 nothing failed, 1 a failure, 4 invalid or inconclusive.

    A known failure that has not expired is no failure; ``strict`` makes it one, and ``not run`` too. A run without
    a single check has shown nothing and is ``UNDECIDED``.
    """
    totals = count(checks)
    if totals[Outcome.FAIL] or (strict and (totals[Outcome.NOT_RUN] or totals[Outcome.KNOWN])):
        return ExitCode.FAILED
    if not checks or totals[Outcome.INVALID] or totals[Outcome.INCONCLUSIVE]:
        return ExitCode.UNDECIDED
    return ExitCode.OK


PARTLY = "partly run"
"""In :attr:`Check.data` of a check that is *not run*: some of what it rests on did run, and passed."""


def headline(checks: Sequence[Check]) -> str:
    """The verdict in one line, gravest first; says INCOMPLETE and how many when something is not run."""
    totals = count(checks)
    parts = [
        f"{word}: {totals[outcome]} of {len(checks)}"
        for outcome, word in (
            (Outcome.FAIL, "FAIL"),
            (Outcome.INVALID, "INVALID"),
            (Outcome.INCONCLUSIVE, "INCONCLUSIVE"),
            (Outcome.KNOWN, "KNOWN FAILURE"),
        )
        if totals[outcome]
    ]
    if totals[Outcome.NOT_RUN] or not checks:
        partly = sum(check.outcome is Outcome.NOT_RUN and bool(check.data.get(PARTLY)) for check in checks)
        entirely = totals[Outcome.NOT_RUN] - partly
        what = [f"{partly} of {len(checks)} run in part"] if partly else []
        what += [f"{entirely} of {len(checks)} not run"] if entirely or not partly else []
        parts.append(f"INCOMPLETE: {', '.join(what)}")
    if totals[Outcome.PASS]:
        parts.append(f"{'PASS' if not parts else 'passed'}: {totals[Outcome.PASS]} of {len(checks)}")
    return ", ".join(parts)
