"""A run as data: its checks per suite, where it ran, and how to repeat it; to and from ``results.json``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from flashrec.errors import ConfigError
from flashrec_harness.environment import Commit, Environment
from flashrec_harness.outcome import Band, Check, Grid, Outcome, Plot, Series, count, headline, worst

SCHEMA = 1


@dataclass(slots=True)
class RunReport:
    """Everything a report shows.

    ``lines`` are the acceptance list's lines, each summing up suites; without them the verdict is that of
    all ``suites``' checks. ``known`` has a row per listed known failure with what became of it. ``seconds`` is the
    run's wall time; ``started`` is in UTC.
    """

    run_id: str
    title: str
    command: str
    started: datetime
    seconds: float
    environment: Environment
    suites: dict[str, list[Check]] = field(default_factory=dict)
    lines: list[Check] = field(default_factory=list)
    known: list[dict[str, Any]] = field(default_factory=list)

    @property
    def judged(self) -> list[Check]:
        """The checks that the verdict is about."""
        return self.lines or [check for checks in self.suites.values() for check in checks]

    @property
    def outcome(self) -> Outcome:
        """The gravest outcome."""
        return worst(check.outcome for check in self.judged)

    @property
    def headline(self) -> str:
        """The verdict in one line."""
        return headline(self.judged)

    @property
    def counts(self) -> dict[Outcome, int]:
        """Checks per outcome."""
        return count(self.judged)

    def only(self, suite: str) -> RunReport:
        """The same run, narrowed to one suite."""
        return RunReport(
            self.run_id,
            suite,
            self.command,
            self.started,
            self.seconds,
            self.environment,
            {suite: self.suites[suite]},
            known=self.known,
        )


def new_run_id(commit: Commit, *, now: datetime | None = None) -> str:
    """``20261129-194200-1a2b3c4d5``: sorts by time and names the commit."""
    moment = now or datetime.now(UTC)
    return f"{moment:%Y%m%d-%H%M%S}-{commit.label.replace(' ', '-')}"


def to_json(report: RunReport) -> bytes:
    """``results.json``: indented, keys in the order they were made, which is that of a table's columns."""
    body: dict[str, Any] = asdict(report)
    body |= {"schema": SCHEMA, "outcome": report.outcome, "headline": report.headline}
    body["order"] = list(report.suites)
    return orjson.dumps(
        body,
        default=_plain,
        option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS,
    )


def _plain(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    raise TypeError(f"results.json cannot hold a {type(value).__name__}: {value!r}")


def from_json(data: bytes) -> RunReport:
    """Read ``results.json`` back. Raises ``ValueError`` if it is of another schema."""
    body = orjson.loads(data)
    if body.get("schema") != SCHEMA:
        raise ValueError(f"results.json has schema {body.get('schema')!r}, this harness reads {SCHEMA}")
    environment = body["environment"]
    return RunReport(
        run_id=body["run_id"],
        title=body["title"],
        command=body["command"],
        started=datetime.fromisoformat(body["started"]),
        seconds=body["seconds"],
        environment=Environment(
            Commit(**environment["commit"]), environment["hard"], environment["soft"], environment["info"]
        ),
        suites={name: [_check(entry) for entry in body["suites"][name]] for name in body["order"]},
        lines=[_check(entry) for entry in body["lines"]],
        known=body.get("known", []),
    )


def _check(entry: dict[str, Any]) -> Check:
    plots = [_plot(plot) for plot in entry.pop("plots")]
    grids = [Grid(**grid) for grid in entry.pop("grids", [])]
    return Check(**(entry | {"outcome": Outcome(entry["outcome"]), "plots": plots, "grids": grids}))


def _plot(entry: dict[str, Any]) -> Plot:
    series = [Series(**one) for one in entry.pop("series")]
    bands = [Band(**one) for one in entry.pop("bands")]
    return Plot(**entry, series=series, bands=bands)


def load(path: Path) -> RunReport:
    """Read a run from its directory, its ``results.json``, or any file beside that.

    Raises :class:`ConfigError` where there is none, or one that is damaged or of another schema.
    """
    directory = path if path.is_dir() else path.parent
    file = directory / "results.json"
    if not path.exists() or not file.is_file():
        raise ConfigError(
            f"{path}: no report: name a run's directory, such as reports/latest, which holds {file.name} once the run "
            "has ended; one that was interrupted has none"
        )
    try:
        return from_json(file.read_bytes())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file}: not a report that can be read ({type(error).__name__}: {error})") from None
