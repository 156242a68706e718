"""One measuring process: ``python -m flashrec_harness.perf.worker TASK.json RESULT.json``.

The task names a subject (the engine in this process, a running server, or a yardstick), a checkpoint and a workload;
the result holds every round. A process measures one subject and then ends, so that no two subjects share memory,
threads or clocks.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import flashrec
from flashrec_harness import hardware
from flashrec_harness.load import LoadResult, batches
from flashrec_harness.material import Material, Prompt, load_material, prompts_digest
from flashrec_harness.outcome import SuiteContext
from flashrec_harness.perf import profiled
from flashrec_harness.perf.rounds import CellRounds, time_rounds
from flashrec_harness.perf.subjects import EngineSubject, HttpSubject, Subject
from flashrec_harness.perf.sweep import measure_sweep
from flashrec_harness.perf.workload import Cell, Sweep, Workload, from_json
from flashrec_harness.planting import planted

Yardstick = Literal["transformers", "sglang"]
SubjectName = Literal["engine", "http", "transformers", "sglang"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a worker measures."""

    subject: SubjectName
    model_path: str
    sid_vocab_file: str | None
    sid: str | None
    sequences: str | None
    url: str | None
    workload: Mapping[str, Any]

    @classmethod
    def of(cls, subject: SubjectName, context: SuiteContext, workload: Workload) -> Task:
        """The task of measuring ``subject`` on a suite's checkpoint."""
        return cls(
            subject=subject,
            model_path=str(context.model_path),
            sid_vocab_file=str(context.sid_vocab_file) if context.sid_vocab_file else None,
            sid=context.sid,
            sequences=str(context.sequences) if context.sequences else None,
            url=context.url,
            workload=asdict(workload),
        )

    def context(self) -> SuiteContext:
        """The checkpoint's part, as suites hold it."""
        return SuiteContext(
            model_path=Path(self.model_path),
            sid_vocab_file=Path(self.sid_vocab_file) if self.sid_vocab_file else None,
            sid=self.sid,
            sequences=Path(self.sequences) if self.sequences else None,
            url=self.url,
        )


def _open(task: Task, workload: Workload, material: Material) -> Subject:
    if task.subject == "engine":
        return EngineSubject(task.context(), workload)
    if task.subject in ("http", "sglang"):
        assert task.url is not None
        layout = material.layout
        tokens = None if layout is None else layout.depth + (layout.end is not None)
        return HttpSubject(task.url, tokens, requests=workload.reference_requests if task.subject == "sglang" else None)
    from flashrec_harness.perf.yardstick import TransformersSubject

    return TransformersSubject(task.context(), workload, material)


def prompts_of(material: Material, workload: Workload, place: Cell | Sweep) -> list[Prompt]:
    """The prompts that a cell or a sweep sends in turn, the same in every process."""
    if place.context is None:
        return material.history_prompts(workload.prompts)
    return material.random_prompts(workload.prompts, place.context, workload.seed)


def measure_cell(subject: Subject, workload: Workload, cell: Cell, prompts: list[Prompt]) -> CellRounds:
    """Warm up, then ``workload.rounds`` timed rounds."""
    subject.prepare(cell, prompts)

    def one_round() -> LoadResult:
        if cell.drive == "batch":
            return batches(subject.generate, subject.round_size(cell), cell.concurrency)
        if cell.drive == "closed":
            return subject.closed(subject.round_size(cell), cell.concurrency)
        assert cell.rate is not None
        return subject.open(subject.round_size(cell), cell.rate, workload.seed)

    found = time_rounds(
        one_round,
        rounds=workload.rounds,
        warmup_rounds=workload.warmup_rounds,
        before_round=subject.flush if cell.cache == "cold" else lambda: None,
        target_ms=cell.target_ms,
    )
    found.hit_rate, found.outputs = subject.hit_rate(), subject.outputs_digest()
    return found


def _sweep(subject: Subject, workload: Workload, material: Material) -> dict[str, Any]:
    sweep = workload.sweep
    if sweep is None:
        return {}
    prompts = prompts_of(material, workload, sweep)
    cell = Cell(n=sweep.n, concurrency=sweep.concurrency, drive="closed")
    subject.prepare(cell, prompts, clients=sweep.clients, keep=False)
    return measure_sweep(subject, sweep, workload.seed)


def measure(task: Task) -> dict[str, Any]:
    """Measure every cell; plain data for ``RESULT.json``. Memory in MiB, start-up in seconds."""
    if task.subject in ("engine", "transformers"):  # a server is asked whether it was profiled
        profiled.watch()
    workload = from_json(task.workload)
    material = load_material(task.context())
    stolen_s = hardware.stolen_s()
    started = time.perf_counter()
    subject = _open(task, workload, material)
    startup_s = time.perf_counter() - started
    cells: dict[str, Any] = {}
    digests: dict[str, str] = {}
    try:
        for cell in workload.cells:
            prompts = prompts_of(material, workload, cell)
            digests[cell.name] = prompts_digest(prompts)
            cells[cell.name] = measure_cell(subject, workload, cell, prompts).as_json()
        swept = _sweep(subject, workload, material) if task.subject in ("engine", "http") else {}
        return {
            "cells": cells,
            "prompts": digests,
            "startup_s": startup_s,
            "stolen_s": hardware.stolen_s() - stolen_s,
            "profiled": subject.was_profiled(),
            "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "peak_gpu_mib": subject.peak_gpu_mib(),
            "configuration": subject.configuration(),
            "pid": os.getpid(),
            "engine": flashrec.__path__[0],
            "sweep": swept,
        }
    finally:
        subject.close()


def main(arguments: list[str]) -> None:
    """Read the task, measure with whatever faults are planted, write the result."""
    task_path, result_path = map(Path, arguments)
    with planted():
        result = measure(Task(**json.loads(task_path.read_text(encoding="utf-8"))))
    result_path.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
