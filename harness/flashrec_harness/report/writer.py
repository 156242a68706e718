"""Writes a run's files: ``reports/<run-id>/`` for the whole, a folder below it per suite, and ``latest``."""

from __future__ import annotations

import os
from pathlib import Path

from flashrec.errors import ConfigError
from flashrec_harness import environment
from flashrec_harness.report import html, junit, markdown, model
from flashrec_harness.report.model import RunReport


def _write_files(report: RunReport, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "report.html").write_text(html.render(report), encoding="utf-8")
    (directory / "summary.md").write_text(markdown.render(report), encoding="utf-8")
    (directory / "results.json").write_bytes(model.to_json(report))
    (directory / "junit.xml").write_bytes(junit.render(report))
    (directory / "env.json").write_text(environment.dump(report.environment), encoding="utf-8")


def claim(root: Path, run_id: str) -> str:
    """Make the run's own directory below ``root``; returns its name, with a number where a run of that second has it.

    Raises :class:`ConfigError` where no run can be kept.
    """
    latest = root / "latest"
    if latest.is_dir() and not latest.is_symlink():
        raise ConfigError(f"{latest}: a directory, where each run leaves a link to itself: move it away")
    name, number = run_id, 1
    while True:
        try:
            (root / name).mkdir(parents=True)
            return name
        except FileExistsError:
            number += 1
            name = f"{run_id}-{number}"
        except OSError as error:
            raise ConfigError(f"{root}: cannot hold reports: {error.strerror or error}") from None


def point_latest(root: Path, run_id: str) -> None:
    """Let ``<root>/latest`` point at a run; replaced in one step, so a reader never finds it missing."""
    fresh = root / f".latest-{os.getpid()}"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(run_id, target_is_directory=True)
    fresh.replace(root / "latest")


def append_step_summary(report: RunReport) -> None:
    """Append ``summary.md`` to the file a GitHub job names in ``GITHUB_STEP_SUMMARY``, if it does."""
    target = os.environ.get("GITHUB_STEP_SUMMARY")
    if target:
        with Path(target).open("a", encoding="utf-8") as handle:
            handle.write(markdown.render(report))


def write(report: RunReport, root: Path) -> Path:
    """Write all of a run's files below ``root`` and return the run's directory.

    Suites have written their logs, traces and ledgers into ``<root>/<run-id>/<suite>/`` already.
    """
    directory = root / report.run_id
    for suite in report.suites:
        _write_files(report.only(suite), directory / suite)
    _write_files(report, directory)
    point_latest(root, report.run_id)
    append_step_summary(report)
    return directory
