"""A workload's sessions over commits: from reports, from the baseline and from the baseline's git history."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashrec.errors import ConfigError
from flashrec_harness import stats
from flashrec_harness.baselines import Samples
from flashrec_harness.environment import differing_keys
from flashrec_harness.outcome import Plot, Series
from flashrec_harness.perf import changepoints
from flashrec_harness.perf.changepoints import ChangePoint
from flashrec_harness.perf.rounds import GATED, UNITS
from flashrec_harness.worktrees import Repository

SESSION_FILE = "session.json"
"""What a run of the suite leaves beside its report."""


@dataclass(frozen=True, slots=True)
class Past:
    """One stored session: its process medians, the commit that it measured and its hard environment."""

    run_id: str
    commit: str
    hard: dict[str, Any]
    samples: Samples

    def value(self, cell: str, metric: str) -> float:
        """The session's figure: the geometric mean of its process medians."""
        return stats.geometric_mean(self.samples[cell][metric])


@dataclass(frozen=True, slots=True)
class Trend:
    """One metric of one cell over the sessions, with its changes of level."""

    cell: str
    metric: str
    sessions: list[Past]
    values: list[float]
    points: list[ChangePoint]

    def rows(self) -> list[dict[str, Any]]:
        """A row per change point: the commit that first shows it, and by how much."""
        worse = GATED[self.metric]
        return [
            {
                "cell": self.cell,
                "metric": self.metric,
                "first seen at": self.sessions[point.index].commit[:9],
                "after": self.sessions[point.index - 1].commit[:9],
                "change %": round(stats.percent(point.change), 1),
                "for the": "worse" if point.change * worse > 0 else "better",
            }
            for point in self.points
        ]

    def plot(self) -> Plot:
        """Session figures over commits, and the levels between change points."""
        numbers = [float(number) for number in range(len(self.values))]
        edges = [number + half for number in numbers for half in (-0.5, 0.5)]
        steps = [level for level in changepoints.levels(self.values, self.points) for _ in range(2)]
        return Plot(
            title=f"{self.metric} over commits, {self.cell}",
            x_label="commit",
            y_label=UNITS[self.metric],
            series=[
                Series("sessions", numbers, self.values),
                Series("level", edges, steps, style="line"),
            ],
            x_ticks=[past.commit[:7] for past in self.sessions],
        )


def comparable(sessions: Sequence[Past], hard: dict[str, Any] | None = None) -> list[Past]:
    """Those whose hard environment is ``hard`` (default: the newest session's)."""
    wanted = hard if hard is not None else sessions[-1].hard
    return [past for past in sessions if not differing_keys(past.hard, _plain(wanted))]


def trends(sessions: Sequence[Past], metrics: Sequence[str] = tuple(GATED)) -> list[Trend]:
    """Every gated metric of every cell of the newest session."""
    found = []
    for cell in sessions[-1].samples:
        for metric in metrics:
            values = [past.value(cell, metric) for past in sessions]
            found.append(Trend(cell, metric, list(sessions), values, changepoints.find(values)))
    return found


def sessions_of(workload: str, reports: Path, baselines: Path) -> list[Past]:
    """All stored sessions of a workload, oldest first: run ids begin with their time."""
    found = {past.run_id: past for past in [*_from_history(workload, baselines), *_from_reports(workload, reports)]}
    return [found[run_id] for run_id in sorted(found)]


def stored(workload: str, reports: Path) -> list[dict[str, Any]]:
    """The session files of a workload's valid runs below ``reports``, oldest first, each run once.

    What keeps reports as an archive makes of ``latest``, a link, a second copy of a run.

    Raises :class:`ConfigError` for a file that is none.
    """
    found = {}
    for path in reports.glob(f"*/perf/{SESSION_FILE}"):
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
            run_id, usable = body["session"]["run_id"], body["workload"] == workload and body["valid"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: not a session file ({type(error).__name__}: {error}); delete it") from None
        if usable:
            found[run_id] = body
    return [found[run_id] for run_id in sorted(found)]


def _from_reports(workload: str, reports: Path) -> Iterator[Past]:
    return (_past(body["session"], body["environment"]["hard"]) for body in stored(workload, reports))


def _from_history(workload: str, directory: Path) -> Iterator[Past]:
    """The sessions of the baseline files, as they are and as every earlier commit has them."""
    for path in sorted(directory.glob(f"*/{workload}.json")):
        for text in [*_versions(path), path.read_text(encoding="utf-8")]:
            body = json.loads(text)
            yield from (_past(session, body["environment"]["hard"]) for session in body["sessions"])


def _versions(path: Path) -> Iterator[str]:
    """The file's contents at every commit that changed it, oldest first; none outside a git repository."""
    try:
        repository = Repository.around(path.parent)
    except ConfigError:
        return
    inside = path.resolve().relative_to(repository.root.resolve()).as_posix()
    for commit in repository.git("log", "--reverse", "--diff-filter=AM", "--format=%H", "--", inside).splitlines():
        yield repository.git("show", f"{commit}:{inside}")


def _past(session: dict[str, Any], hard: dict[str, Any]) -> Past:
    return Past(session["run_id"], session["commit"], hard, session["samples"])


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    """As JSON gives it back, which is what stored sessions hold."""
    plain: dict[str, Any] = json.loads(json.dumps(value))
    return plain


def describe(trend: Trend) -> str:
    """One line: how many sessions, the newest figure, and the last change of level."""
    newest = f"{len(trend.values)} sessions, newest {trend.values[-1]:.4g} {UNITS[trend.metric]}"
    if trend.points:
        (*_, last) = trend.rows()
        return f"{newest}; changed {last['change %']:+.1f} % at {last['first seen at']}"
    if len(trend.values) < changepoints.FEWEST:
        return f"{newest}; change points are looked for in {changepoints.FEWEST} sessions and more"
    noise = stats.percent(statistics.stdev(map(_log, trend.values)))
    return f"{newest}; one level, {noise:.1f} % between sessions"


def _log(value: float) -> float:
    return stats.log_ratio(value, 1.0)
