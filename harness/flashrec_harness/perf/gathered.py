"""A baseline from sessions that are stored already: of one machine, or of several, gathered in one folder."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashrec_harness import baselines
from flashrec_harness.baselines import Baseline, BaselineError, MeasuredSession
from flashrec_harness.environment import Commit, differing_keys
from flashrec_harness.perf import history


@dataclass(frozen=True, slots=True)
class Written:
    """A baseline file, the sessions in it, what changed, and why other sessions are not in it (reason: how many)."""

    path: Path
    sessions: list[MeasuredSession]
    changes: list[str]
    left_out: Counter[str]


def stored_sessions(reports: Path, workload: str, hard: dict[str, Any], commit: str) -> list[MeasuredSession]:
    """Valid sessions below ``reports`` of the same workload, hard environment and clean commit, oldest first."""
    wanted = json.loads(json.dumps(hard))
    bodies = history.stored(workload, reports)
    return [MeasuredSession(**body["session"]) for body in bodies if not _why_not(body, wanted, commit)]


def write(
    workload: str, reports: Path, directory: Path, *, commit: str = "", reason: str, accept_wider: bool = False
) -> Written:
    """Write the baseline of ``workload`` in ``directory`` from the sessions below ``reports``.

    The newest session says which commit and which hard environment; ``commit`` is the beginning of another commit.
    Sessions of several boots make a band that holds for machines that were not measured.

    Raises :class:`BaselineError` where there is no session, where a server did not say what it runs, and as
    :func:`flashrec_harness.baselines.update` does.
    """
    bodies = history.stored(workload, reports)
    newest = _newest(bodies, commit)
    if newest is None:
        of = f" of commit {commit}" if commit else ""
        raise BaselineError(
            f"baseline not written: {reports} holds no valid session of workload {workload!r} of a clean tree{of}; "
            f"a session is a folder RUN/perf/{history.SESSION_FILE}"
        )
    where = newest["environment"]
    if where["hard"]["device"] == "unknown":
        raise BaselineError("baseline not written: the sessions are of a server that does not say what it runs")
    sha = newest["session"]["commit"]
    sessions = stored_sessions(reports, workload, where["hard"], sha)
    fresh = Baseline(workload, where["hard"], where["soft"], where["info"], sessions)
    path = baselines.path_for(directory, where["hard"]["device"], workload)
    changes = baselines.update(path, fresh, commit=Commit(**where["commit"]), reason=reason, accept_wider=accept_wider)
    reasons = (_why_not(body, where["hard"], sha) for body in bodies)
    return Written(path, sessions, changes, Counter(filter(None, reasons)))


def _newest(bodies: Sequence[dict[str, Any]], commit: str) -> dict[str, Any] | None:
    clean = (body for body in reversed(bodies) if not body["environment"]["commit"]["dirty"])
    return next((body for body in clean if body["session"]["commit"].startswith(commit)), None)


def _why_not(body: dict[str, Any], hard: dict[str, Any], commit: str) -> str:
    """Why a session is not one of that commit in that environment; empty if it is."""
    if body["environment"]["commit"]["dirty"]:
        return "the tree was dirty"
    if body["session"]["commit"] != commit:
        return f"commit {body['session']['commit'][:9]}"
    return ", ".join(sorted(differing_keys(body["environment"]["hard"], hard)))
