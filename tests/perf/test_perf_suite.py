"""The perf suite on the bundled checkpoint: real processes, the yardstick, a server, and a profiled process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import profiler as autograd_profiler

from flashrec_harness.outcome import Outcome, SuiteContext
from flashrec_harness.perf import profiled, suite
from flashrec_harness.perf.measure import run_in_child
from flashrec_harness.perf.worker import Task
from flashrec_harness.servers import flashrec_server

TINY: dict[str, Any] = {
    "name": "tiny",
    "processes": 2,
    "rounds": 2,
    "warmup_rounds": 1,
    "prompts": 8,
    "reference_requests": 1,
    "cells": [{"n": 4, "concurrency": 2, "requests": 4}],
}


def workload_file(folder: Path, **changes: object) -> str:
    path = folder / "tiny.json"
    path.write_text(json.dumps(TINY | changes))
    return str(path)


@pytest.mark.slow
def test_the_bundled_checkpoint_is_measured(suite_context: SuiteContext, tmp_path: Path) -> None:
    checks = {check.name: check for check in suite.run(replace(suite_context, workload=workload_file(tmp_path)))}
    assert checks["measurement is valid"].outcome is Outcome.PASS
    assert checks["against baseline"].outcome is Outcome.NOT_RUN
    figures = checks["figures n=4, 2 at once, histories, warm, batch"]
    assert figures.outcome is Outcome.PASS
    samples = figures.data["samples"]
    assert {len(values) for values in samples.values()} == {2}
    assert min(samples["throughput"]) > 0
    assert min(samples["ratio"]) > 0
    assert all(low <= high for low, high in zip(samples["p50_ms"], samples["p99_ms"], strict=True))
    assert figures.data["hit_rate"] > 0
    assert checks["start-up and memory"].data["configuration"]["kernels"]


@pytest.mark.slow
def test_a_running_server_is_measured_and_one_that_was_profiled_is_invalid(
    suite_context: SuiteContext, tmp_path: Path
) -> None:
    cells = [
        {"n": 4, "concurrency": 2, "requests": 4, "drive": "closed", "cache": "cold"},
        {"n": 4, "requests": 4, "drive": "open", "rate": 100.0, "target_ms": 1e4},
    ]
    workload = workload_file(tmp_path, cells=cells, reference_requests=0)
    profiles = {"FLASHREC_TORCH_PROFILER_DIR": str(tmp_path / "profiles")}
    with flashrec_server(
        suite_context.model_path, sid_vocab_file=suite_context.sid_vocab_file, log_dir=tmp_path, env=profiles
    ) as server:
        context = replace(suite_context, url=server.url, workload=workload)
        clean = suite.run(context)
        from flashrec_harness.traces import record

        record(server.url, [(1, 2, 3)], tmp_path / "profiles", num_requests=2)
        stained = suite.run(context)
    assert clean[0].outcome is Outcome.PASS
    assert clean[2].data["samples"]["goodput"][0] > 0
    assert stained[0].outcome is Outcome.INVALID
    assert "has been profiled" in stained[0].reason
    assert stained[-1].reason == "the measurement is not valid"


@pytest.mark.slow
def test_a_process_that_fails_makes_the_suite_fail_with_its_log(suite_context: SuiteContext, tmp_path: Path) -> None:
    broken = workload_file(tmp_path, engine={"max_rows": 1})
    with pytest.raises(RuntimeError, match=r"(?s)exit code 1.*max_rows"):
        suite.run(replace(suite_context, workload=broken))


def test_one_retry_for_memory_at_start_and_it_is_recorded(tmp_path: Path) -> None:
    from simulated_engine import SimulatedEngine, workload

    from flashrec_harness.children import ChildError
    from flashrec_harness.perf.measure import measure

    engine, failures = SimulatedEngine(seed=1), iter(["out of memory"])

    def flaky(task: Task, prefix: Path) -> Mapping[str, Any]:
        if reason := next(failures, ""):
            raise ChildError(reason)
        return engine(task, prefix)

    context = SuiteContext(model_path=tmp_path)
    assert measure(context, workload(), run=flaky).retries == ["out of memory"]
    failures = iter(["wrong result"])
    with pytest.raises(ChildError, match="wrong result"):
        measure(context, workload(), run=flaky)


def test_a_profiler_that_has_ended_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autograd_profiler, "_run_on_profiler_start", autograd_profiler._run_on_profiler_start)
    monkeypatch.setattr(profiled, "_seen", [])
    profiled.watch()
    assert not profiled.ever()
    with torch.profiler.profile():
        torch.ones(2) + 1
    assert profiled.ever()


def test_the_default_settings_measure_in_child_processes() -> None:
    assert suite.PerfSettings().run is run_in_child


def test_the_command_to_repeat_names_what_was_not_the_default(tmp_path: Path) -> None:
    settings = suite.PerfSettings(baselines=tmp_path, beam=4, against="HEAD")
    assert settings.flags == ["--beam", "4", "--against", "HEAD", "--baselines-dir", str(tmp_path)]
    assert suite.PerfSettings().flags == []
