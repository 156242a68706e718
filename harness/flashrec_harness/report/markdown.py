"""The short report: for pull requests, ``$GITHUB_STEP_SUMMARY`` and terminals without colour."""

from __future__ import annotations

from typing import Any

from flashrec_harness.outcome import Check, Outcome
from flashrec_harness.report.model import RunReport

_SIGNS = {
    Outcome.PASS: "✅ pass",
    Outcome.FAIL: "❌ **fail**",
    Outcome.INCONCLUSIVE: "❔ **inconclusive**",
    Outcome.INVALID: "⚠️ **invalid**",
    Outcome.NOT_RUN: "⚪ not run",
    Outcome.KNOWN: "🟠 known failure",
}


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _table(checks: list[Check]) -> list[str]:
    rows = ["| check | outcome | what was seen |", "|---|---|---|"]
    for check in checks:
        seen = (
            check.summary
            if check.outcome is Outcome.PASS
            else ". ".join(filter(None, [check.reason.rstrip("."), check.summary]))
        )
        rows.append(f"| {_cell(check.name)} | {_SIGNS[check.outcome]} | {_cell(seen)} |")
    return rows


def _rows(rows: list[dict[str, Any]]) -> list[str]:
    lines = [" | ".join(["", *rows[0], ""]).strip(), "|" + "---|" * len(rows[0])]
    return lines + [" | ".join(["", *(_cell(str(value)) for value in row.values()), ""]).strip() for row in rows]


def render(report: RunReport) -> str:
    """``summary.md``: the verdict, one table per suite, and how to repeat what is red."""
    environment = report.environment
    parts = [
        f"## FlashRec {report.title}: {report.headline}",
        "",
        f"commit `{environment.commit.label}`, {environment.hard.get('device', 'unknown device')}, "
        f"{report.started:%Y-%m-%d %H:%M} UTC, {report.seconds:.0f} s",
        "",
    ]
    if report.lines:
        parts += [*_table(report.lines), ""]
    for name, checks in report.suites.items():
        parts += [f"### {name}", "", *_table(checks), ""]
        for check in checks:
            if check.printed and check.rows:
                parts += [f"#### {check.name}", "", *_rows(check.rows), ""]
    if report.known:
        parts += ["### Known failures", "", *_rows(report.known), ""]
    red = [c for checks in report.suites.values() for c in checks if _needs_repeat(c)]
    if red:
        parts += [
            "### Repeat",
            "",
            "```bash",
            *dict.fromkeys(line for check in red for line in check.commands),
            "```",
            "",
        ]
    parts += ["Repeat the whole run:", "", "```bash", report.command, "```"]
    return "\n".join(parts) + "\n"


def _needs_repeat(check: Check) -> bool:
    return bool(check.commands) and check.outcome in (Outcome.FAIL, Outcome.INVALID, Outcome.INCONCLUSIVE)
