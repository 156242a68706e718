"""Measuring processes one after the other, and what they have in common: a session of process medians."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flashrec_harness.baselines import MeasuredSession, Samples
from flashrec_harness.children import ChildError, run_module
from flashrec_harness.outcome import SuiteContext
from flashrec_harness.perf.rounds import CellRounds
from flashrec_harness.perf.worker import SubjectName, Task
from flashrec_harness.perf.workload import Workload

PROCESS_TIMEOUT_S = 1800.0
RunTask = Callable[[Task, Path], Mapping[str, Any]]
"""Measures a task, keeping its files under a path prefix; tests put a simulated engine here."""


@dataclass(slots=True)
class ProcessResult:
    """What one measuring process found."""

    cells: dict[str, CellRounds]
    prompts: dict[str, str]
    startup_s: float
    profiled: bool
    peak_rss_mib: float
    peak_gpu_mib: float | None
    configuration: dict[str, Any]
    pid: int
    engine: str = ""
    """The directory that ``flashrec`` was imported from."""
    sweep: dict[str, Any] = field(default_factory=dict)
    """What :func:`flashrec_harness.perf.sweep.measure_sweep` found, where the workload has one."""

    def graph_cost(self) -> dict[str, float]:
        """Seconds of capturing and memory of the captured graphs; empty where the engine tells of none."""
        told = self.configuration.get("engine", self.configuration)
        fields = (("graph capture s", "capture_seconds", 1), ("graph memory MiB", "graph_bytes", 2**20))
        return {name: round(told[field] / unit, 2) for name, field, unit in fields if field in told}

    def resources(self) -> dict[str, float | None]:
        """Start-up time, memory and what graphs cost, as a table row; ``None`` without a GPU's memory."""
        return {
            "start-up s": round(self.startup_s, 2),
            "peak host memory MiB": round(self.peak_rss_mib),
            "peak GPU memory MiB": None if self.peak_gpu_mib is None else round(self.peak_gpu_mib),
            **self.graph_cost(),
        }

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> ProcessResult:
        """From a worker's result."""
        cells = {name: CellRounds(**rounds) for name, rounds in body["cells"].items()}
        return cls(**{**body, "cells": cells})


@dataclass(slots=True)
class Measurement:
    """All processes of one session, in the order they ran; ``retries`` names each repeated start."""

    engine: list[ProcessResult]
    reference: ProcessResult | None
    retries: list[str] = field(default_factory=list)

    def reference_throughput(self, cell: str) -> float | None:
        """Median requests per second of the yardstick at a cell."""
        if self.reference is None or not self.reference.cells[cell].throughput:
            return None
        return statistics.median(self.reference.cells[cell].throughput)

    def samples(self) -> Samples:
        """Process medians per cell and metric, with the ratio to the yardstick where it was timed."""
        result: Samples = {}
        for cell in self.engine[0].cells:
            figures = [process.cells[cell].metrics() for process in self.engine]
            result[cell] = {metric: [one[metric] for one in figures] for metric in figures[0]}
            yardstick = self.reference_throughput(cell)
            if yardstick is not None:
                result[cell]["ratio"] = [value / yardstick for value in result[cell]["throughput"]]
        return result

    def session(self, *, run_id: str, commit: str, boot_id: str) -> MeasuredSession:
        """What a baseline stores."""
        rounds: dict[str, dict[str, list[list[float]]]] = {}
        for cell in self.engine[0].cells:
            per_process = [process.cells[cell].per_round() for process in self.engine]
            rounds[cell] = {metric: [one[metric] for one in per_process] for metric in per_process[0]}
        return MeasuredSession(run_id, commit, boot_id, self.samples(), rounds)


def run_in_child(task: Task, prefix: Path, env: Mapping[str, str] | None = None) -> Mapping[str, Any]:
    """Measure in a fresh process; leaves ``<prefix>.task.json``, ``.result.json`` and ``.log``.

    ``env`` is added to the child's environment.
    """
    task_file, result_file = prefix.with_suffix(".task.json"), prefix.with_suffix(".result.json")
    task_file.parent.mkdir(parents=True, exist_ok=True)
    task_file.write_text(json.dumps(asdict(task), indent=1), encoding="utf-8")
    run_module(
        "flashrec_harness.perf.worker",
        [str(task_file), str(result_file)],
        log=prefix.with_suffix(".log"),
        timeout_s=PROCESS_TIMEOUT_S,
        env=env,
    )
    body: Mapping[str, Any] = json.loads(result_file.read_text(encoding="utf-8"))
    return body


def _with_retry(run: RunTask, task: Task, prefix: Path, retries: list[str]) -> ProcessResult:
    """One retry for a process that ran out of memory at its start, recorded; anything else raises at once."""
    try:
        return ProcessResult.of(run(task, prefix))
    except ChildError as error:
        if "out of memory" not in str(error).lower():
            raise
        retries.append(str(error).splitlines()[0])
        return ProcessResult.of(run(task, prefix))


def measure(context: SuiteContext, workload: Workload, *, reference: bool, run: RunTask = run_in_child) -> Measurement:
    """``workload.processes`` processes of the subject, with the yardstick timed in between.

    The yardstick runs in the middle, so that a machine that slows down over the session slows both alike.
    """
    subject: SubjectName = "http" if context.url else "engine"
    found = Measurement([], None)
    for number in range(workload.processes):
        if reference and number == workload.processes // 2:
            task = Task.of("transformers", context, workload)
            found.reference = _with_retry(run, task, context.out_dir / "transformers", found.retries)
        prefix = context.out_dir / f"process-{number}"
        found.engine.append(_with_retry(run, Task.of(subject, context, workload), prefix, found.retries))
    return found
