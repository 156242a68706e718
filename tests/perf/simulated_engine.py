"""An engine on a simulated clock: the same rounds, figures and verdicts as a real one, in microseconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flashrec_harness import load
from flashrec_harness.perf.rounds import time_rounds
from flashrec_harness.perf.worker import Task
from flashrec_harness.perf.workload import Cell, Workload, from_json


def workload(**changes: Any) -> Workload:
    """Two small cells."""
    fields: dict[str, Any] = {
        "name": "simulated",
        "cells": (Cell(n=10, requests=16), Cell(n=10, concurrency=8, requests=32)),
        "processes": 3,
        "rounds": 5,
    }
    return Workload(**(fields | changes))


@dataclass
class SimulatedEngine:
    """Serves a batch in ``batch_ms``; noise is log-normal with the given standard deviations.

    Call :meth:`new_session` between invocations. ``slowdown`` multiplies every time. It stands in for
    :func:`flashrec_harness.perf.measure.run_in_child`.
    """

    seed: int
    batch_ms: float = 20.0
    slowdown: float = 1.0
    session_sd: float = 0.003
    process_sd: float = 0.004
    round_sd: float = 0.01
    outputs: str = "same"
    profiled: bool = False
    failing: bool = False
    configuration: dict[str, Any] = field(default_factory=dict)
    tasks: list[Task] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.new_session()

    def new_session(self) -> None:
        self.session_factor = self._noise(self.session_sd)

    def _noise(self, deviation: float) -> float:
        return float(np.exp(self.rng.normal(0, deviation)))

    def __call__(self, task: Task, prefix: Path) -> Mapping[str, Any]:
        self.tasks.append(task)
        process = self._noise(self.process_sd) * self.session_factor * self.slowdown
        plan = from_json(task.workload)
        return {
            "cells": {cell.name: self._cell(plan, cell, process) for cell in plan.cells},
            "prompts": {cell.name: "digest" for cell in plan.cells},
            "startup_s": 1.5,
            "profiled": self.profiled,
            "peak_rss_mib": 512.0,
            "peak_gpu_mib": None,
            "configuration": self.configuration,
            "pid": len(self.tasks),
        }

    def _cell(self, plan: Workload, cell: Cell, process: float) -> dict[str, Any]:
        now = 0.0

        def generate(numbers: Sequence[int]) -> None:
            nonlocal now
            if self.failing:
                raise ConnectionError("gone")
            now += self.batch_ms / 1e3 * process * self._noise(self.round_sd)

        found = time_rounds(
            lambda: load.batches(generate, cell.requests, cell.concurrency, clock=lambda: now),
            rounds=plan.rounds,
            warmup_rounds=plan.warmup_rounds,
        )
        found.outputs = self.outputs if self.outputs != "different" else str(len(self.tasks))
        return found.as_json()
