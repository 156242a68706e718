"""The pytest plugin, in pytest sessions of its own: skips, failures, markers, profiles."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from flashrec_harness import hardware

pytest_plugins = ["pytester"]

CONFTEST = Path(__file__).parents[2] / "conftest.py"

GPU_TEST = """
import pytest

@pytest.mark.gpu
def test_on_gpu(): pass

def test_anywhere(): pass
"""

needs_no_gpu = pytest.mark.skipif(hardware.has_gpu(), reason="shows what happens without a GPU")


@pytest.fixture(autouse=True)
def _keep_hypothesis_profile() -> Iterator[None]:
    profile = hypothesis.settings.get_current_profile_name()
    yield
    hypothesis.settings.load_profile(profile)


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    """A session in this process, with the plugin loaded as a checkout's conftest.py loads it."""
    pytester.makeconftest(CONFTEST.read_text(encoding="utf-8"))
    return pytester.runpytest_inprocess("-rs", "-q", *arguments)


@needs_no_gpu
def test_a_missing_gpu_is_a_skip_with_its_reason(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(GPU_TEST)
    result = run(pytester)
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["*no GPU*"])
    assert result.ret == 0


@needs_no_gpu
def test_a_missing_gpu_fails_where_one_is_required(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(GPU_TEST)
    result = run(pytester, "--require-gpu")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*--require-gpu: no GPU*"])
    assert result.ret != 0


def test_a_gpu_session_without_gpu_tests_fails(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_anywhere(): pass")
    result = run(pytester, "--require-gpu")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*no GPU test ran*"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_folders_carry_their_suites_marker(pytester: pytest.Pytester) -> None:
    for suite in ("kernel", "perf"):
        folder = pytester.mkdir(suite)
        (folder / f"test_{suite}_one.py").write_text("def test_it(): pass")
    pytester.makepyfile(test_top="def test_top(): pass")
    run(pytester, "-m", "perf", "--strict-markers").assert_outcomes(passed=1, deselected=2)


@pytest.mark.parametrize(("budget", "examples", "same"), [("ci", 50, True), ("nightly", 1000, False)])
def test_hypothesis_profiles(pytester: pytest.Pytester, budget: str, examples: int, same: bool) -> None:
    pytester.makepyfile(
        f"""
        from hypothesis import settings

        def test_profile():
            assert settings().max_examples == {examples}
            assert settings().derandomize is {same}
        """
    )
    run(pytester, f"--hypothesis-budget={budget}").assert_outcomes(passed=1)


def test_suite_context_takes_the_options(pytester: pytest.Pytester) -> None:
    model = pytester.mkdir("model")
    (model / "catalog.json").write_text("{}")
    pytester.makepyfile(
        """
        def test_context(suite_context, tmp_path):
            assert suite_context.model_path.name == "model"
            assert suite_context.sid_vocab_file.name == "catalog.json"
            assert suite_context.url == "http://127.0.0.1:1"
            assert (suite_context.seed, suite_context.quick) == (7, True)
            assert suite_context.out_dir == tmp_path
        """
    )
    options = ("--model-path", str(model), "--url", "http://127.0.0.1:1", "--harness-seed", "7")
    run(pytester, *options).assert_outcomes(passed=1)


FAKE_DRIVER = """#!/bin/sh
case "$1" in
*compute-apps*) ;;
*) printf '0, GPU-a, NVIDIA H200, 143771, 580.1, 9.0\\n1, GPU-b, NVIDIA H200, 143771, 580.1, 9.0\\n' ;;
esac
"""

PINNED_TEST = """
import os
import sys

SEEN = ("torch" in sys.modules, os.environ["CUDA_VISIBLE_DEVICES"])

def test_pinned_before_torch(worker_id):
    assert SEEN == (False, worker_id.removeprefix("gw"))

test_again = test_pinned_before_torch
"""


@pytest.mark.slow
def test_each_xdist_worker_has_its_own_gpu_before_torch_is_imported(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two real workers and a simulated driver with two GPUs."""
    pytest.importorskip("xdist")
    driver = pytester.path / "nvidia-smi"
    driver.write_text(FAKE_DRIVER)
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", f"{pytester.path}:/usr/bin:/bin")
    for name in ("CUDA_VISIBLE_DEVICES", *(name for name in os.environ if name.startswith("PYTEST_XDIST"))):
        monkeypatch.delenv(name, raising=False)
    pytester.makeconftest(CONFTEST.read_text(encoding="utf-8"))
    pytester.makepyfile(PINNED_TEST)
    result = pytester.runpytest_subprocess("-q", "-n", "2", "--dist", "each")
    result.assert_outcomes(passed=4)
