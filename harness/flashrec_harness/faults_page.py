"""The page of planted faults: who caught each, as one run of `flashrec-harness faults` saw it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from flashrec_harness.environment import Environment
from flashrec_harness.fault_trials import SUITES, CleanRun
from flashrec_harness.outcome import Check, Outcome

if TYPE_CHECKING:
    from flashrec_harness.faults import Fault

WORDS = {Outcome.PASS: "caught", Outcome.FAIL: "missed", Outcome.NOT_RUN: "not run", Outcome.INVALID: "invalid"}
_SHOWN = 300
_PATH = re.compile(r"(?<![\w.])/[\w./+-]+/")

_HEAD = """# Planted faults

Each fault is planted on purpose (`--plant NAME` on any suite's command) and must be seen by the suites in its row.
*caught*: the check that should goes red, and in the way it should. *not run*: it takes a GPU, where the same command
runs it. Written by `flashrec-harness faults --page docs/faults.md`; no figure here is written by hand.
"""


def matrix(faults: Mapping[str, Fault], checks: Mapping[str, Check]) -> list[dict[str, object]]:
    """One row per fault, one column per suite; ``checks`` by :attr:`~flashrec_harness.fault_trials.Trial.name`."""
    return [
        {"fault": fault.name, **{suite: _cell(checks.get(f"{fault.name}, {suite}")) for suite in SUITES}}
        for fault in faults.values()
    ]


def _cell(check: Check | None) -> str:
    return "" if check is None else WORDS[check.outcome]


def clean_rows(runs: Sequence[CleanRun]) -> list[dict[str, object]]:
    """One row per suite over its clean runs; times in seconds, on the clock and of computing."""
    rows: list[dict[str, object]] = []
    for suite in dict.fromkeys(run.suite for run in runs):
        mine = [run for run in runs if run.suite == suite]
        times = [run.seconds for run in mine]
        rows.append(
            {
                "suite": suite,
                "runs": len(mine),
                "red": sum(bool(run.red) for run in mine),
                "passed": _range([run.counts[Outcome.PASS] for run in mine]),
                "not run": _range([run.counts[Outcome.NOT_RUN] for run in mine]),
                "mean s": f"{sum(times) / len(times):.0f}",
                "longest s": f"{max(times):.0f}",
                "all s": f"{sum(times):.0f}",
                "mean CPU s": f"{sum(run.cpu_seconds for run in mine) / len(mine):.0f}",
            }
        )
    return rows


def _clean_sentence(runs: Sequence[CleanRun]) -> str:
    """What the clean runs showed, in words."""
    said = "The other way round, the quick form of each suite with nothing planted"
    red = {suite: sum(bool(run.red) for run in runs if run.suite == suite) for suite in (run.suite for run in runs)}
    named = ", ".join(f"{suite} {times}" for suite, times in red.items() if times)
    if named:
        return f"{said}: {sum(red.values())} of {len(runs)} runs had a red ({named})."
    return f"{said}: none of {len(runs)} runs had a red."


def _range(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if min(numbers) == max(numbers) else f"{min(numbers)} to {max(numbers)}"


def render(
    faults: Mapping[str, Fault], checks: Sequence[Check], runs: Sequence[CleanRun], where: Environment, date: str
) -> str:
    """The page as Markdown."""
    by_name = {check.name: check for check in checks}
    ran_on = f"Run on {where.hard['device']}, {date}, at commit {where.commit.label}."
    rows = [
        {**row, "fault": f"`{row['fault']}`", "what is wrong": faults[str(row["fault"])].what}
        for row in matrix(faults, by_name)
    ]
    said = [
        {
            "fault": f"`{fault.name}`",
            "suite": catch.suite,
            "what it said": _short(by_name[f"{fault.name}, {catch.suite}"]),
        }
        for fault in faults.values()
        for catch in fault.catches
    ]
    return "\n".join(
        [
            _HEAD,
            ran_on,
            "\n## Who catches what\n",
            _table(rows),
            "\n## The clean engine\n",
            f"{_clean_sentence(runs)}\n",
            _table(clean_rows(runs)),
            "\n## What the suites said\n",
            _table(said),
            "",
        ]
    )


def _short(check: Check) -> str:
    text = _PATH.sub("", f"{check.reason}; {check.summary}" if check.reason else check.summary)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN].rsplit(' ', 1)[0]} ..."


def _table(rows: Sequence[Mapping[str, object]]) -> str:
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns)]
    lines += [[str(row[column]).replace("|", "\\|") for column in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
