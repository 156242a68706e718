"""One process of the suite: ``python -m flashrec_harness.determinism.worker TASK.json REPORT.json``."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from pathlib import Path

import torch

from flashrec_harness.determinism.axes import AXES, Axis
from flashrec_harness.determinism.lab import Lab
from flashrec_harness.determinism.records import ProcessReport
from flashrec_harness.determinism.task import Task
from flashrec_harness.planting import planted


def perform(task: Task) -> ProcessReport:
    """Run the task's axes; neighbours with the same engine settings share an engine."""
    report = ProcessReport(
        process=task.process,
        hash_seed=os.environ.get("PYTHONHASHSEED", "random"),
        threads=torch.get_num_threads(),
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    )
    lab = Lab(task, report)

    def settings(axis: Axis) -> tuple[object, ...]:
        return (*sorted(axis.overrides(task).items()), axis.prepare)

    axes = [AXES[name] for name in task.axes]
    for _, group in itertools.groupby(axes, key=settings):
        _run_group(lab, list(group))
    return report


def _run_group(lab: Lab, axes: list[Axis]) -> None:
    with lab.engine(**axes[0].overrides(lab.task)) as engine:
        if axes[0].prepare is not None:
            axes[0].prepare(engine)
        for axis in axes:
            for event in (*axis.proves, *axis.forbids):
                lab.report.count(axis.name, event, 0)
            started = time.monotonic()
            axis.run(lab, engine)
            lab.report.seconds[axis.name] = time.monotonic() - started


def main(arguments: list[str]) -> None:
    """Read the task, run it with whatever faults are planted, write the report."""
    task_path, report_path = map(Path, arguments)
    with planted():
        report = perform(Task.of(json.loads(task_path.read_text(encoding="utf-8"))))
    report.write(report_path)


if __name__ == "__main__":
    main(sys.argv[1:])
