"""The command line: exit codes, one-line errors, and reports that are written whatever happens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flashrec.errors import ConfigError
from flashrec_harness import cli, hardware, runner
from flashrec_harness.outcome import Check, Outcome, SuiteContext
from flashrec_harness.report import model


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def call(*arguments: object) -> int:
    with pytest.raises(SystemExit) as exit_info:
        cli.main([str(argument) for argument in arguments])
    code = exit_info.value.code
    return code if isinstance(code, int) else 0


def planted(monkeypatch: pytest.MonkeyPatch, result: Outcome | Exception) -> None:
    """Let every suite return one check with this outcome, or raise."""

    def run(context: SuiteContext) -> list[Check]:
        if isinstance(result, Exception):
            raise result
        return [Check("parity", "planted", result, "summary")]

    monkeypatch.setattr(runner, "suite_function", lambda name: run)


@pytest.mark.parametrize(
    ("outcome", "strict", "code"),
    [
        (Outcome.PASS, False, 0),
        (Outcome.FAIL, False, 1),
        (Outcome.INVALID, False, 4),
        (Outcome.INCONCLUSIVE, False, 4),
        (Outcome.NOT_RUN, False, 0),
        (Outcome.NOT_RUN, True, 1),
    ],
)
def test_a_suites_outcome_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path, tmp_path: Path, outcome: Outcome, strict: bool, code: int
) -> None:
    planted(monkeypatch, outcome)
    reports = tmp_path / "reports"
    arguments = ["parity", "--model-path", checkpoint, "--reports-dir", reports]
    assert call(*arguments, *(["--strict"] if strict else [])) == code
    report = model.load(reports / "latest" / "parity")
    assert report.suites["parity"][0].outcome is outcome
    assert report.suites["parity"][0].repeat == f"python -m flashrec_harness parity --model-path {checkpoint}"
    assert call("show", reports / "latest") == (0 if strict else code)


def test_a_suite_that_crashes_is_invalid_and_leaves_its_traceback(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path, tmp_path: Path
) -> None:
    planted(monkeypatch, ZeroDivisionError("somewhere"))
    reports = tmp_path / "reports"
    assert call("determinism", "--model-path", checkpoint, "--reports-dir", reports) == 4
    (check,) = model.load(reports / "latest").suites["determinism"]
    assert check.reason == "ZeroDivisionError: somewhere"
    assert "Traceback" in (reports / "latest" / "determinism" / "error.txt").read_text()


def test_a_users_error_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planted(monkeypatch, ConfigError("dtype: must be\n float32"))
    assert call("parity", "--model-path", checkpoint, "--reports-dir", tmp_path) == 2
    assert capsys.readouterr().err == "error: dtype: must be float32\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["parity", "--model-path", "nowhere"],
        ["parity", "--no-such-flag"],
        ["perf", "--beam", "0"],
        ["trace", "nowhere.json.gz"],
        ["show", "nowhere"],
        ["repro", "nowhere.json"],
        ["repro", "."],
        ["show", "tests"],
        ["perf", "--update-baseline"],
        ["perf", "--seed", "7"],
        ["perf", "--model-path", "README.md"],
        ["perf", "--quick", "--workload", "serving"],
        ["kernel", "--url", "http://127.0.0.1:1"],
        ["kernel", "--quick", "--reports-dir", "README.md"],
        ["kernel", "--quick", "--reports-dir", "README.md/below"],
        ["baseline", "verify", "nowhere"],
        ["baseline", "verify", "docs"],
        ["baseline", "show", "nowhere"],
        ["trend", "quick", "--html", "tests"],
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*arguments) == 2
    assert capsys.readouterr().err


@pytest.mark.skipif(hardware.has_gpu(), reason="shows what happens without a GPU")
def test_require_gpu_without_one_fails_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path, tmp_path: Path
) -> None:
    planted(monkeypatch, Outcome.PASS)
    arguments = ("parity", "--model-path", checkpoint, "--reports-dir", tmp_path, "--require-gpu")
    assert call(*arguments) == 1
    (check,) = model.load(tmp_path / "latest").suites["parity"]
    assert check.reason.startswith("--require-gpu: no GPU")


def test_accept_writes_its_lines_and_every_suite(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path, tmp_path: Path
) -> None:
    def suite(name: str) -> object:
        outcome = Outcome.NOT_RUN if name == "trace" else Outcome.PASS
        names = ["spans", "FP8 GEMMs are FP8"] if name == "trace" else ["check"]
        return lambda context: [Check(name, check, outcome, "s", reason="no GPU") for check in names]

    monkeypatch.setattr(runner, "suite_function", suite)
    monkeypatch.setattr("flashrec_harness.acceptance.unit_tests", suite("unit"))
    assert call("accept", "--quick", "--model-path", checkpoint, "--reports-dir", tmp_path) == 0
    report = model.load(tmp_path / "latest")
    assert [line.outcome for line in report.lines] == [
        *[Outcome.PASS] * 3,
        *[Outcome.NOT_RUN] * 2,
        *[Outcome.PASS] * 2,
    ]
    assert report.headline == "INCOMPLETE: 2 of 7 not run, passed: 5 of 7"
    assert set(report.suites) == {"unit", "kernel", "parity", "determinism", "eval", "trace", "perf"}
    env = json.loads((tmp_path / "latest" / "perf" / "env.json").read_text())
    assert env["hard"]["model"]

    without = ["--without", "unit", "--without", "trace"]
    assert call("accept", "--quick", "--model-path", checkpoint, "--reports-dir", tmp_path, *without) == 0
    report = model.load(tmp_path / "latest")
    assert [line.outcome for line in report.lines] == [
        Outcome.NOT_RUN,
        *[Outcome.PASS] * 2,
        *[Outcome.NOT_RUN] * 2,
        *[Outcome.PASS] * 2,
    ]
    assert report.lines[0].reason.endswith("left out: --without unit")
    assert call("accept", "--without", "tarce", "--reports-dir", tmp_path) == 2


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("flashrec_harness.cli", {"torch", "transformers", "pandas", "scipy.stats", "fastapi"}),
        ("flashrec_harness.httpcost.clients", {"torch", "transformers", "pandas", "scipy.stats", "fastapi"}),
        ("flashrec.front.process", {"pandas", "scipy"}),
    ],
)
def test_a_process_starts_without_what_it_may_never_need(module: str, absent: set[str]) -> None:
    """The command line is imported in 0.8 to 1.1 s; with torch, scipy and pandas it took 4.3 to 5.1 (AMD EPYC)."""
    lines = f"import sys, {module}; print(*sorted({absent!r} & sys.modules.keys()))"
    child = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=True, timeout=120)
    assert child.stdout.split() == []
