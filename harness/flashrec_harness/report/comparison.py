"""Two runs side by side: ``flashrec-harness compare BEFORE AFTER``."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from flashrec.errors import ConfigError
from flashrec_harness.environment import differing_keys
from flashrec_harness.outcome import Check, ExitCode, Outcome
from flashrec_harness.report.model import RunReport
from flashrec_harness.report.terminal import rows_table
from flashrec_harness.stats import log_ratio, percent

_BADNESS = {Outcome.FAIL: 2, Outcome.INVALID: 1, Outcome.INCONCLUSIVE: 1}
"""A check that could not be decided and fails now is worse than it was; what passes or is not run has none."""


def _checks(report: RunReport) -> dict[str, Check]:
    return {f"{c.suite}: {c.name}": c for checks in report.suites.values() for c in checks}


def changed_outcomes(before: RunReport, after: RunReport) -> list[dict[str, Any]]:
    """Checks whose outcome differs, or that only one run has."""
    old, new = _checks(before), _checks(after)
    rows = []
    for name in dict.fromkeys([*old, *new]):
        was, now = (side[name].outcome if name in side else "absent" for side in (old, new))
        if was != now:
            rows.append({"check": name, "before": str(was), "after": str(now)})
    return rows


def changed_figures(before: RunReport, after: RunReport) -> list[dict[str, Any]]:
    """Median figures of the cells that both runs measured; for people, since no noise band is applied."""
    old = dict(_figures(before))
    return [
        {
            "cell": cell,
            "metric": metric,
            "before": old[cell, metric],
            "after": value,
            "change %": percent(log_ratio(value, old[cell, metric])),
        }
        for (cell, metric), value in _figures(after)
        if (cell, metric) in old
    ]


def _figures(report: RunReport) -> Iterator[tuple[tuple[str, str], float]]:
    for check in report.suites.get("perf", []):
        for metric, values in check.data.get("samples", {}).items():
            yield (check.data["cell"], metric), statistics.median(values)


def show(before: RunReport, after: RunReport, console: Console) -> ExitCode:
    """Print the differences; exit code 1 if a check is red now that was not before, or fails that was undecided.

    Raises :class:`ConfigError` for runs that have no check in common.
    """
    if not _checks(before).keys() & _checks(after).keys():
        ran = " and ".join(", ".join(report.suites) or "nothing" for report in (before, after))
        raise ConfigError(f"compare: the runs have no check in common ({ran}): name two runs of one suite")
    console.print(f"before {before.run_id}: {before.headline}", markup=False)
    console.print(f"after  {after.run_id}: {after.headline}", markup=False)
    for tier in ("hard", "soft"):
        ours, theirs = getattr(after.environment, tier), getattr(before.environment, tier)
        rows: list[dict[str, Any]] = [
            {f"{tier} key": key, "before": was, "after": now}
            for key, (now, was) in differing_keys(ours, theirs).items()
        ]
        if rows:
            console.print(rows_table(f"environment, {tier}", rows))
    outcomes = changed_outcomes(before, after)
    tables = (("outcomes", outcomes, "no difference"), ("figures", changed_figures(before, after), "none in both runs"))
    for title, table, otherwise in tables:
        if table:
            console.print(rows_table(title, table))
        else:
            console.print(f"{title}: {otherwise}", markup=False)
    worse = [row for row in outcomes if _BADNESS.get(row["after"], 0) > _BADNESS.get(row["before"], 0)]
    return ExitCode.FAILED if worse else ExitCode.OK
