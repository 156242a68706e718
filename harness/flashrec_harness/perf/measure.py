"""Measuring processes one after the other, and what they have in common: a session of process medians."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from flashrec.console import make_console
from flashrec_harness.baselines import MeasuredSession, Samples
from flashrec_harness.children import ChildError, run_module
from flashrec_harness.outcome import SuiteContext
from flashrec_harness.perf.rounds import CellRounds
from flashrec_harness.perf.worker import SubjectName, Task, Yardstick
from flashrec_harness.perf.workload import Workload
from flashrec_harness.sglang_env import named_url

PROCESS_TIMEOUT_S = 1800.0
_progress = make_console(stderr=True)
RATIOS: Mapping[Yardstick, str] = {"transformers": "ratio", "sglang": "sglang_ratio"}
"""The metric that holds the subject's throughput over a yardstick's."""
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
    stolen_s: float = 0.0
    """What the host of a virtual machine kept from it meanwhile: see :func:`flashrec_harness.hardware.stolen_s`."""
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
            "CPU taken by the host s": round(self.stolen_s, 2),
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
    yardsticks: dict[Yardstick, ProcessResult] = field(default_factory=dict)
    retries: list[str] = field(default_factory=list)

    def samples(self) -> Samples:
        """Process medians per cell and metric, with the ratio to each yardstick that was timed."""
        result: Samples = {}
        for cell in self.engine[0].cells:
            figures = [process.cells[cell].metrics() for process in self.engine]
            result[cell] = {metric: [one[metric] for one in figures] for metric in figures[0]}
            for name, process in self.yardsticks.items():
                if process.cells[cell].throughput:
                    usual = statistics.median(process.cells[cell].throughput)
                    result[cell][RATIOS[name]] = [value / usual for value in result[cell]["throughput"]]
        return result

    def session(self, *, run_id: str, commit: str, boot_id: str) -> MeasuredSession:
        """What a baseline stores."""
        rounds: dict[str, dict[str, list[list[float]]]] = {}
        for cell in self.engine[0].cells:
            per_process = [process.cells[cell].per_round() for process in self.engine]
            rounds[cell] = {metric: [one[metric] for one in per_process] for metric in per_process[0]}
        return MeasuredSession(run_id, commit, boot_id, self.samples(), rounds)


def progress(text: str) -> None:
    """A line on stderr, for whoever waits."""
    _progress.print(f"perf: {text}", highlight=False, markup=False)


def run_in_child(task: Task, prefix: Path, env: Mapping[str, str] | None = None) -> Mapping[str, Any]:
    """Measure in a fresh process; leaves ``<prefix>.task.json``, ``.result.json`` and ``.log``.

    ``env`` is added to the child's environment.
    """
    started = time.monotonic()
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
    progress(f"{prefix.name} took {time.monotonic() - started:.0f} s")
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


def yardsticks_of(context: SuiteContext, workload: Workload) -> list[Yardstick]:
    """What can be timed beside the subject: ``transformers`` over a catalog, and an SGLang that already runs."""
    if workload.reference_requests == 0:
        return []
    found: list[Yardstick] = ["transformers"] if context.sid_vocab_file is not None else []
    return found if named_url() in (None, context.url) else [*found, "sglang"]


def measure(
    context: SuiteContext, workload: Workload, *, yardsticks: Sequence[Yardstick] = (), run: RunTask = run_in_child
) -> Measurement:
    """``workload.processes`` processes of the subject, with the yardsticks timed in between.

    They run in the middle, so that a machine that slows down over the session slows all alike.
    """
    subject: SubjectName = "http" if context.url else "engine"
    found = Measurement([])
    for number in range(workload.processes):
        for name in yardsticks if number == workload.processes // 2 else ():
            where = replace(context, url=named_url()) if name == "sglang" else context
            task = Task.of(name, where, workload)
            found.yardsticks[name] = _with_retry(run, task, context.out_dir / name, found.retries)
        prefix = context.out_dir / f"process-{number}"
        found.engine.append(_with_retry(run, Task.of(subject, context, workload), prefix, found.retries))
    return found
