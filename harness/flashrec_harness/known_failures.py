"""Known failures: checks that may fail until a date, each with an owner; listed in every report."""

from __future__ import annotations

import datetime
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from flashrec.errors import ConfigError
from flashrec_harness.outcome import Check, Outcome

FILE = Path("known-failures.toml")
"""``[[failure]]`` tables with the fields of :class:`KnownFailure`; ``device`` may be left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFailure:
    """``check`` is the check's name, ``*`` and ``?`` as in file names; ``device`` as the report's head names it."""

    suite: str
    check: str
    owner: str
    expires: datetime.date
    reason: str
    device: str = "*"

    def covers(self, check: Check, device: str) -> bool:
        """Whether this entry is about ``check`` on ``device``."""
        names = self.suite == check.suite and fnmatchcase(check.name, self.check)
        return names and fnmatchcase(device, self.device)

    def __str__(self) -> str:
        return f"{self.owner}, until {self.expires}: {self.reason}"


def load(path: Path = FILE) -> list[KnownFailure]:
    """The listed failures; none without the file. Raises :class:`ConfigError` naming entry and field."""
    if not path.is_file():
        return []
    try:
        body = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    if unknown := sorted(body.keys() - {"failure"}):
        raise ConfigError(f"{path}: {unknown[0]}: unknown; entries are [[failure]] tables")
    entries = body.get("failure", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{path}: failure: entries are [[failure]] tables, in two pairs of brackets")
    return [_entry(path, number, entry) for number, entry in enumerate(entries, start=1)]


def _entry(path: Path, number: int, entry: Mapping[str, Any]) -> KnownFailure:
    kinds = {field.name: datetime.date if field.name == "expires" else str for field in fields(KnownFailure)}
    where = f"{path}: failure {number}"
    if unknown := sorted(entry.keys() - kinds.keys()):
        raise ConfigError(f"{where}: {unknown[0]}: unknown field; there are {', '.join(kinds)}")
    for name, kind in kinds.items():
        if name not in entry and name != "device":
            raise ConfigError(f"{where}: {name} is missing")
        if name in entry and (type(entry[name]) is not kind or entry[name] == ""):
            wanted = "a date such as 2027-01-31, without quotes" if kind is datetime.date else "a text"
            raise ConfigError(f"{where}: {name} must be {wanted}, got {entry[name]!r}")
    return KnownFailure(**entry)


def apply(
    known: Sequence[KnownFailure], suite: str, checks: Sequence[Check], *, device: str, today: datetime.date
) -> list[Check]:
    """Mark the suite's listed failures, in place; returns a failing check for each entry that is stale.

    A listed check that fails is a *known failure*; after the last day it is a plain failure again. An entry whose
    checks all pass is stale and must go, or the next failure of that check would be excused. Inconclusive and
    invalid checks are left as they are: nobody promised those.
    """
    stale = []
    for entry in (one for one in known if one.suite == suite):
        covered = [check for check in checks if entry.covers(check, device)]
        for check in covered:
            if check.outcome is Outcome.FAIL:
                _mark(check, entry, today)
        if covered and all(check.outcome is Outcome.PASS for check in covered):
            reason = f"passes, but {FILE} lists it ({entry}): remove the entry"
            stale.append(Check(suite, f"known failure {entry.check}", Outcome.FAIL, "", reason=reason))
    return stale


def _mark(check: Check, entry: KnownFailure, today: datetime.date) -> None:
    if today > entry.expires:
        check.reason = f"{check.reason}; its entry in {FILE} has expired ({entry})"
    else:
        check.outcome, check.reason = Outcome.KNOWN, f"{check.reason}; known: {entry}"


def table(
    known: Sequence[KnownFailure], suites: Mapping[str, Sequence[Check]], *, device: str, today: datetime.date
) -> list[dict[str, Any]]:
    """A row per entry for the report, whether or not its check was seen in this run."""
    return [
        {
            "suite": entry.suite,
            "check": entry.check,
            "owner": entry.owner,
            "until": f"{entry.expires}{' (expired)' if today > entry.expires else ''}",
            "in this run": _seen(entry, suites.get(entry.suite, ()), device),
            "reason": entry.reason,
        }
        for entry in known
    ]


def _seen(entry: KnownFailure, checks: Sequence[Check], device: str) -> str:
    found = [str(check.outcome) for check in checks if entry.covers(check, device)]
    return ", ".join(dict.fromkeys(found)) or "not judged"
