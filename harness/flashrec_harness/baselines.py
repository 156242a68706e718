"""Stored baselines: every sample, the environment in tiers, and a centre and band that must follow from them.

One file per workload and device, ``baselines/<device>/<workload>.json``. Keys are sorted and floats have a
fixed format, so that a baseline's diff in a pull request reads well; the summary is recomputed on load, so
that an edited number is caught.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashrec.errors import FlashRecError
from flashrec_harness import stats
from flashrec_harness.environment import Commit, differing_keys
from flashrec_harness.hardware import device_slug

SCHEMA = 1
MIN_SESSIONS = 3
_DIGITS = 6

Metric = str
Cell = str
Samples = dict[Cell, dict[Metric, list[float]]]
"""Process medians of one session: cell -> metric -> one value per process, in order."""


class BaselineError(FlashRecError):
    """A baseline is malformed, was edited, or may not be written; the message says which and why."""


@dataclass(frozen=True, slots=True)
class MeasuredSession:
    """One invocation on one boot: its process medians, and the rounds behind them for people.

    ``rounds`` has cell -> metric -> one list of round values per process. ``commit`` is the measured one.
    """

    run_id: str
    commit: str
    boot_id: str
    samples: Samples
    rounds: dict[Cell, dict[Metric, list[list[float]]]] = field(default_factory=dict)


@dataclass(slots=True)
class Baseline:
    """A workload's stored figures on one device."""

    workload: str
    hard: dict[str, Any]
    soft: dict[str, Any]
    info: dict[str, Any]
    sessions: list[MeasuredSession]
    history: list[dict[str, str]] = field(default_factory=list)

    @property
    def cells(self) -> list[Cell]:
        """Every cell of the first session; all sessions have the same."""
        return sorted(self.sessions[0].samples)

    @property
    def boots(self) -> int:
        """How many machines, or starts of one, the sessions come from."""
        return len({session.boot_id for session in self.sessions})

    def spread(self, cell: Cell, metric: Metric) -> stats.Spread:
        """Centre and noise of one metric over the stored sessions."""
        return stats.spread([session.samples[cell][metric] for session in self.sessions])

    def summary(self) -> dict[Cell, dict[Metric, dict[str, float]]]:
        """Centre and band (log-ratio half-width for as many processes as a stored session has)."""
        result: dict[Cell, dict[Metric, dict[str, float]]] = {}
        for cell in self.cells:
            result[cell] = {}
            for metric, values in sorted(self.sessions[0].samples[cell].items()):
                found = self.spread(cell, metric)
                result[cell][metric] = {"centre": found.centre, "band": stats.band(found, len(values))}
        return result

    def refusal(self, hard: Mapping[str, Any]) -> str:
        """Why a run with these hard keys may not be compared with this baseline; empty if it may."""
        return "; ".join(
            f"{key}: baseline {theirs!r}, this run {ours!r}"
            for key, (ours, theirs) in differing_keys(dict(hard), self.hard).items()
        )

    def soft_differences(self, soft: Mapping[str, Any]) -> list[str]:
        """Soft keys that differ: the comparison screens only."""
        return sorted(differing_keys(dict(soft), self.soft))


def path_for(directory: Path, device: str, workload: str) -> Path:
    """Where a workload's baseline on ``device`` is kept."""
    return directory / device_slug(device) / f"{workload}.json"


def devices(directory: Path, workload: str) -> list[str]:
    """Slugs of the devices that have a baseline of ``workload``."""
    return sorted(path.parent.name for path in directory.glob(f"*/{workload}.json"))


def _fixed(value: Any) -> Any:
    """Floats to six significant digits; what is stored is what is summed up, so loading finds the same."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {str(key): _fixed(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_fixed(one) for one in value]
    return value


def _digest(body: Mapping[str, Any]) -> str:
    text = json.dumps({k: v for k, v in body.items() if k != "digest"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def dump(baseline: Baseline) -> str:
    """The file's text."""
    stored = Baseline(
        baseline.workload,
        _fixed(baseline.hard),
        _fixed(baseline.soft),
        _fixed(baseline.info),
        [_session(_fixed(_session_json(session))) for session in baseline.sessions],
        baseline.history,
    )
    body: dict[str, Any] = {
        "schema": SCHEMA,
        "workload": stored.workload,
        "environment": {"hard": stored.hard, "soft": stored.soft, "info": stored.info},
        "history": stored.history,
        "sessions": [_session_json(session) for session in stored.sessions],
        "summary": _fixed(stored.summary()),
    }
    return _layout(body | {"digest": _digest(body)}) + "\n"


def _layout(value: Any, depth: int = 0) -> str:
    """JSON with one key per line, but a list of numbers on one line: a process is then one diff line."""
    pad = "  " * (depth + 1)
    if isinstance(value, dict) and value:
        items = (f"{pad}{json.dumps(key)}: {_layout(value[key], depth + 1)}" for key in sorted(value))
        return "{\n" + ",\n".join(items) + "\n" + pad[2:] + "}"
    if isinstance(value, list) and any(isinstance(one, (dict, list)) for one in value):
        return "[\n" + ",\n".join(pad + _layout(one, depth + 1) for one in value) + "\n" + pad[2:] + "]"
    return json.dumps(value)


def _session_json(session: MeasuredSession) -> dict[str, Any]:
    return {
        "run_id": session.run_id,
        "commit": session.commit,
        "boot_id": session.boot_id,
        "samples": session.samples,
        "rounds": session.rounds,
    }


def _session(entry: Mapping[str, Any]) -> MeasuredSession:
    return MeasuredSession(**entry)


def load(path: Path) -> Baseline:
    """Read a baseline and check that nothing in it was changed by hand.

    Raises :class:`BaselineError` for another schema, an edited summary or an edited sample.
    """
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        if body["schema"] != SCHEMA:
            raise BaselineError(f"{path}: schema {body['schema']!r}, this harness reads {SCHEMA}")
        tiers = body["environment"]
        baseline = Baseline(
            body["workload"],
            tiers["hard"],
            tiers["soft"],
            tiers["info"],
            [_session(entry) for entry in body["sessions"]],
            body["history"],
        )
        expected, told, digest = _fixed(baseline.summary()), body["summary"], body["digest"]
        seen = {cell: {metric: told.get(cell, {}).get(metric) for metric in expected[cell]} for cell in expected}
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise BaselineError(f"{path}: not a baseline file ({type(error).__name__}: {error})") from None
    for cell, metrics in expected.items():
        for metric, values in metrics.items():
            stored = seen[cell][metric]
            if stored != values:
                raise BaselineError(
                    f"{path}: {cell} {metric} says {stored}, its samples give {values}; "
                    "the file was edited: restore it or write it with `perf --update-baseline`"
                )
    if digest != _digest(body):
        raise BaselineError(
            f"{path}: content digest {digest} does not match {_digest(body)}; "
            "the file was edited: restore it or write it with `perf --update-baseline`"
        )
    return baseline


def wider_bands(old: Baseline, new: Baseline) -> list[str]:
    """Metrics whose noise band would grow, with both half-widths in percent."""
    before, after = _fixed(old.summary()), _fixed(new.summary())
    return [
        f"{cell} {metric}: {stats.percent(before[cell][metric]['band']):.1f} % -> {stats.percent(values['band']):.1f} %"
        for cell, metrics in after.items()
        for metric, values in metrics.items()
        if metric in before.get(cell, {}) and values["band"] > before[cell][metric]["band"]
    ]


def _same_shape(sessions: Sequence[MeasuredSession]) -> bool:
    shapes = [{cell: sorted(metrics) for cell, metrics in s.samples.items()} for s in sessions]
    return all(shape == shapes[0] for shape in shapes)


def update(
    path: Path,
    fresh: Baseline,
    *,
    commit: Commit,
    reason: str,
    accept_wider: bool = False,
    min_sessions: int = MIN_SESSIONS,
) -> list[str]:
    """Write ``fresh`` to ``path`` and return what changed, one line per metric.

    Raises :class:`BaselineError` instead for a dirty tree or none, no reason, too few sessions, sessions
    that measured different cells or commits, or a wider band without ``accept_wider``.
    """
    if not commit.sha or commit.dirty:
        raise BaselineError(f"baseline not written: the tree is {commit.label}; commit first")
    if not reason.strip():
        raise BaselineError("baseline not written: say why with --reason")
    if len(fresh.sessions) < min_sessions:
        raise BaselineError(
            f"baseline not written: {len(fresh.sessions)} session(s), {min_sessions} needed; run "
            "`flashrec-harness perf` again (a session is one invocation)"
        )
    others = {session.commit for session in fresh.sessions} - {commit.sha}
    if others:
        raise BaselineError(f"baseline not written: sessions of other commits: {', '.join(sorted(others))}")
    if not _same_shape(fresh.sessions):
        raise BaselineError("baseline not written: the sessions measured different cells or metrics")
    old = load(path) if path.exists() else None
    if old is not None and not accept_wider and (wider := wider_bands(old, fresh)):
        raise BaselineError(f"baseline not written: wider band ({'; '.join(wider)}); --accept-wider allows it")
    entry = {"commit": commit.sha, "reason": reason.strip(), "run_id": fresh.sessions[-1].run_id}
    fresh.history = [*(old.history if old else []), entry]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dump(fresh), encoding="utf-8")
    return describe_change(old, fresh)


def describe_change(old: Baseline | None, new: Baseline) -> list[str]:
    """One line per metric: old centre, new centre, change in percent."""
    before = old.summary() if old else {}
    lines = []
    for cell, metrics in new.summary().items():
        for metric, values in metrics.items():
            was = before.get(cell, {}).get(metric)
            change = f" ({stats.percent(stats.log_ratio(values['centre'], was['centre'])):+.1f} %)" if was else ""
            start = f"{was['centre']:.4g} -> " if was else ""
            lines.append(f"{cell} {metric}: {start}{values['centre']:.4g}{change}")
    return lines
