"""The registry of planted faults, the trials' verdicts, and the page that lists them."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from flashrec import Engine, EngineConfig, Request
from flashrec_harness import cli, fault_trials, faults_page, hardware
from flashrec_harness.children import package_path
from flashrec_harness.environment import collect
from flashrec_harness.fault_trials import SUITES, CleanRun
from flashrec_harness.outcome import Check, Outcome, count
from flashrec_harness.overload import suite as overload
from flashrec_harness.overload.suite import OverloadSettings, Round
from flashrec_harness.planting import PLANT_VARIABLE
from flashrec_harness.soak import suite as soak
from flashrec_harness.soak.suite import SoakSettings
from flashrec_harness.soak.traffic import Tally
from flashrec_harness.soak.watch import Held, Memory

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"

ASKED_FOR = {
    "a cache keyed by id(request)": "id-keyed-cache",
    "stale padding rows": "stale-padding-rows",
    "split count from the batch": "split-count-from-batch",
    "unseeded tie-break": "unseeded-tie-break",
    "KV page reused too early": "early-page-reuse",
    "wrong RoPE position by one after a cache hit": "rope-off-by-one-after-hit",
    "a scale dropped to 1.0": "scale-dropped",
    "parents off by one at one width": "parents-off-by-one-at-one-width",
    "allow-list ignored in the beam path": "allow-list-ignored",
    "a kernel wrong only in its last partial block": "wrong-last-block",
    "a kernel returning zeros": "zeros-kernel",
    "eager decode": "eager-decode",
    "bf16 GEMMs under an FP8 flag": "bf16-under-fp8",
    "a synchronisation in the decode loop": "sync-in-decode",
    "an allocation per step": "allocation-per-step",
    "a 5 % slowdown": "slowdown",
    "a leak of one page per cancelled request": "page-leak-on-cancel",
    "a corrupted trace": "corrupted-trace",
    "an edited baseline": "edited-baseline",
    "a profiled process used for timing": "profiled-process",
    "a duplicated beam": "duplicated-beam",
    "an illegal SID": "illegal-sid",
}


def test_every_fault_that_was_asked_for_is_registered_and_has_a_suite(faults: ModuleType) -> None:
    assert set(ASKED_FOR.values()) <= set(faults.FAULTS)
    for fault in faults.FAULTS.values():
        assert fault.catches, fault.name
        assert {catch.suite for catch in fault.catches} <= set(SUITES)
        assert fault.what.endswith("."), fault.name


def test_every_check_of_the_server_suites_has_a_fault_that_reddens_it(faults: ModuleType) -> None:
    """The names come from the suites themselves, so that a check that is added asks for its fault."""
    tally, memory = Tally(compared=1), Memory([0.0], [1.0])
    held = Held(requests=0, queued=0, lost_pages=0, pinned_pages=0, rows=0, usable_pages=1)
    soaked, settings = SoakSettings(), OverloadSettings()
    rounds = [Round(1.0, 4.0, 1.0, 1.0)] * 2
    checks = [
        soak._mixed(tally, soaked, 1, reloads=True),
        soak._right(tally, [], []),
        soak._no_server_errors(tally, soaked),
        soak._no_leaks(held, held, 0),
        soak._flat(memory, soaked, 1),
        overload._offered(rounds, [], settings),
        overload._goodput(rounds, settings),
        overload._refusals([]),
        overload._nothing_else([], [], 200),
    ]
    catches = [catch for fault in faults.FAULTS.values() for catch in fault.catches]
    for check in checks:
        assert any(catch.suite == check.suite and catch.check in check.name for catch in catches), check.name


def test_front_processes_carry_the_faults_too(tmp_path: Path) -> None:
    """Such a process is started with *spawn*: it runs the module of its parent's main program once more."""
    probe = tmp_path / "probe.py"
    probe.write_text(
        "import multiprocessing, runpy, sys\n"
        "from flashrec.server.lifecycle import Places\n"
        "def look() -> None:\n"
        "    print('planted' if Places.taken == 0 else 'clean', flush=True)\n"
        "def main() -> None:\n"
        "    process = multiprocessing.get_context('spawn').Process(target=look)\n"
        "    process.start()\n"
        "    process.join()\n"
    )
    start = (
        "import runpy, sys; import flashrec.cli, probe; flashrec.cli.main = probe.main;"
        "sys.argv = ['x', 'flashrec']; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{package_path()}"}
    for module, name, seen in (
        ("flashrec_harness.faults.child", "unbounded-queue", "planted"),
        ("flashrec_harness.faults.child", "", "clean"),
    ):
        ran = subprocess.run(
            [sys.executable, "-c", start.format(module=module)],
            env=environment | {PLANT_VARIABLE: name},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.stdout.strip() == seen, ran.stderr


def listed(page: str) -> dict[str, list[str]]:
    """Fault to its cells in the page's matrix, by the order of the suites."""
    table = page.split("## Who catches what", 1)[1].split("\n## ", 1)[0]
    rows = (re.split(r" ?\| ?", line.strip()[1:-1]) for line in table.splitlines() if line.startswith("| `"))
    return {row[0].strip(" `"): [cell.strip() for cell in row[1 : 1 + len(SUITES)]] for row in rows}


def test_the_page_lists_exactly_the_registered_faults(faults: ModuleType) -> None:
    found = listed(PAGE.read_text(encoding="utf-8"))
    assert list(found) == list(faults.FAULTS)
    for name, cells in found.items():
        catches = {catch.suite: catch for catch in faults.FAULTS[name].catches}
        assert {suite for suite, cell in zip(SUITES, cells, strict=True) if cell} == set(catches), name
        assert set(cells) <= {"", "caught", "not run"}, f"{name} was not caught when the page was written"
        assert all(catches[suite].gpu for suite, cell in zip(SUITES, cells, strict=True) if cell == "not run"), name


@pytest.mark.parametrize("command", [*SUITES, "accept"])
def test_every_suite_command_takes_a_fault(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLANT_VARIABLE, "")
    monkeypatch.setattr(cli, "Session", None)  # nothing may start
    with pytest.raises(SystemExit) as left:
        cli.main([command, "--plant", "nonsense"])
    assert left.value.code == 2


BUNDLED = fault_trials.Checkpoint()


def trial(faults: ModuleType, name: str) -> fault_trials.Trial:
    fault = faults.FAULTS[name]
    return fault_trials.Trial(fault, fault.catches[0])


def answer(monkeypatch: pytest.MonkeyPatch, checks: Sequence[Check], error: str = "") -> list[list[str]]:
    """Let the suite's process report ``checks``; returns the commands that were to be run."""
    commands: list[list[str]] = []

    def run(command: list[str], where: Path, planted: str = "") -> fault_trials.Ran:
        commands.append(command)
        return fault_trials.Ran(list(checks), error, 2.0, 1.5)

    monkeypatch.setattr(fault_trials, "_run", run)
    return commands


CONFESSION = Check("kernel", "engine unmodified", Outcome.INVALID, "", reason="planted on purpose")


def test_caught_missed_and_no_verdict(faults: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one, name = trial(faults, "zeros-kernel"), "rms_norm (triton, float32, cpu)"
    commands = answer(monkeypatch, [CONFESSION, Check("kernel", name, Outcome.FAIL, "", reason="zeros")])
    assert fault_trials.run_trial(one, tmp_path, BUNDLED).outcome is Outcome.PASS
    assert commands[0][3:5] == ["kernel", "--quick"]
    assert commands[0][-4:] == ["--only", "rms_norm", "--plant", "zeros-kernel"]
    for other in (Check("kernel", name, Outcome.PASS, ""), Check("kernel", "silu_mul (triton)", Outcome.FAIL, "")):
        answer(monkeypatch, [CONFESSION, other])
        assert fault_trials.run_trial(one, tmp_path, BUNDLED).outcome is Outcome.FAIL
    answer(monkeypatch, [], "exit code 2: no such model")
    broken = fault_trials.run_trial(one, tmp_path, BUNDLED)
    assert (broken.outcome, broken.reason[-14:]) == (Outcome.INVALID, " no such model")


@pytest.mark.skipif(hardware.has_gpu(), reason="shows what happens without a GPU")
def test_what_takes_a_gpu_is_not_run_and_says_why(faults: ModuleType, tmp_path: Path) -> None:
    check = fault_trials.run_trial(trial(faults, "eager-decode"), tmp_path, BUNDLED)
    assert check.outcome is Outcome.NOT_RUN
    assert "no GPU" in check.reason


def test_an_fp8_trial_gets_an_fp8_checkpoint(
    faults: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hardware, "has_gpu", lambda: True)
    commands = answer(monkeypatch, [Check("trace", "FP8 GEMMs are FP8", Outcome.FAIL, "", reason="no FP8 GEMM ran")])
    assert fault_trials.run_trial(trial(faults, "bf16-under-fp8"), tmp_path, BUNDLED).outcome is Outcome.PASS
    model = Path(commands[0][commands[0].index("--model-path") + 1])
    engine = Engine(EngineConfig(model_path=model, sid_vocab_file=model / "catalog.json"))
    assert engine.parts.fp8
    assert len(engine.generate([Request(input_ids=(5, 6, 7), n=3)])[0].beams) == 3
    engine.close()


def test_a_missed_fault_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(PLANT_VARIABLE, "")
    answer(monkeypatch, [Check("kernel", "rms_norm (triton)", Outcome.PASS, "")])
    call = ["faults", "zeros-kernel", "--clean-runs", "0", "--reports-dir", str(tmp_path)]
    missed = CliRunner().invoke(cli.app, call)
    assert missed.exit_code == 1, missed.output
    assert "missed" in missed.output
    answer(monkeypatch, [Check("kernel", "rms_norm (triton)", Outcome.FAIL, "")])
    assert CliRunner().invoke(cli.app, call).exit_code == 0


def test_a_process_is_waited_for_and_what_it_wrote_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLANT_VARIABLE, "nothing-of-the-parent")
    body = {"suite": "perf", "name": "a", "outcome": "fail", "summary": "s", "reason": "r"}
    program = tmp_path / "suite.py"
    program.write_text(
        "import json, os, pathlib, sys\n"
        f"assert {PLANT_VARIABLE!r} not in os.environ\n"
        f"pathlib.Path(sys.argv[1]).write_text(json.dumps([{body!r}]))\n"
    )
    ran = fault_trials._run([sys.executable, str(program), str(tmp_path / "checks.json")], tmp_path)
    assert [(check.name, check.outcome, check.reason) for check in ran.checks] == [("a", Outcome.FAIL, "r")], ran
    assert ran.cpu_seconds > 0
    broken = fault_trials._run([sys.executable, "-c", "raise SystemExit('no such model')"], tmp_path / "other")
    assert (broken.checks, broken.error) == ([], "exit code 1: no such model")


def test_a_process_that_never_ends_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_trials, "_TIMEOUT_S", 0.5)
    ran = fault_trials._run([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path)
    assert ran.seconds < 30
    assert ran.error.startswith("exit code -15")


def test_clean_rounds_run_every_suite_and_judge_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(PLANT_VARIABLE, "")
    commands = answer(monkeypatch, [Check("any", "a", Outcome.PASS, "")])
    call = ["faults", "--clean-only", "--clean-runs", "3", "--reports-dir", str(tmp_path)]
    done = CliRunner().invoke(cli.app, call)
    assert done.exit_code == 0, done.output
    assert sorted(command[3] for command in commands) == sorted(SUITES * 3)
    commands.clear()
    done = CliRunner().invoke(cli.app, [*call, "--suite", "trace", "--suite", "kernel"])
    assert done.exit_code == 0, done.output
    assert sorted(command[3] for command in commands) == ["kernel"] * 3 + ["trace"] * 3
    wrong = CliRunner().invoke(cli.app, [*call, "--suite", "trace", "--suite", "trave"])
    assert "no 'trave'; there are kernel" in str(wrong.exception)


def run_of(outcome: Outcome, *red: str) -> CleanRun:
    return CleanRun("kernel", count([Check("kernel", "a", outcome, "")]), red, 2.0, 1.5)


def test_one_red_among_clean_runs_fails() -> None:
    green = [run_of(Outcome.PASS)] * 3
    assert fault_trials.judge_clean(green).outcome is Outcome.PASS
    found = fault_trials.judge_clean([*green, run_of(Outcome.FAIL, "a: fail: why")])
    assert (found.outcome, found.reason) == (Outcome.FAIL, "a: fail: why")
    assert found.summary.startswith("3 of 4 runs without a red")
    assert fault_trials.judge_clean([run_of(Outcome.NOT_RUN)]).outcome is Outcome.INVALID


def test_a_page_shows_no_path_of_this_machine(faults: ModuleType, tmp_path: Path) -> None:
    checks = [
        Check("faults", f"{f.name}, {catch.suite}", Outcome.PASS, "/opt/some/where.json: the file | was edited")
        for f in faults.FAULTS.values()
        for catch in f.catches
    ]
    page = faults_page.render(faults.FAULTS, checks, [run_of(Outcome.PASS)], collect(), "2026-11-30")
    assert set(listed(page)) == set(faults.FAULTS)
    assert "/opt" not in page
    assert "where.json: the file \\| was edited" in page


def test_the_page_says_what_its_clean_runs_showed(faults: ModuleType) -> None:
    checks = [
        Check("faults", f"{f.name}, {catch.suite}", Outcome.PASS, "")
        for f in faults.FAULTS.values()
        for catch in f.catches
    ]
    green, red = run_of(Outcome.PASS), run_of(Outcome.FAIL, "a: fail: why")

    def said(*runs: CleanRun) -> str:
        page = faults_page.render(faults.FAULTS, checks, runs, collect(), "2026-11-30")
        return page.split("## The clean engine")[1].strip().splitlines()[0]

    assert said(green, green).endswith("none of 2 runs had a red.")
    other = dataclasses.replace(red, suite="perf")
    assert said(green, red, red, other).endswith("3 of 4 runs had a red (kernel 2, perf 1).")


def test_a_page_needs_a_whole_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(PLANT_VARIABLE, "")
    for part in (["zeros-kernel"], ["--suite", "perf"], ["--clean-runs", "0"], ["--clean-only"]):
        with pytest.raises(SystemExit) as left:
            cli.main(["faults", *part, "--page", str(tmp_path / "page.md"), "--reports-dir", str(tmp_path)])
        assert left.value.code == 2
