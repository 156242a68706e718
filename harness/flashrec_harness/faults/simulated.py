"""The perf suite on a simulated clock: ``python -m flashrec_harness.faults.simulated DIRECTORY RESULT.json``.

A change of 5 % cannot be told from noise on a busy machine, so here a wave takes what its rows cost, with a quiet
machine's noise, and waiting moves the clock. All else is real: engine, rounds, sessions, baseline and verdicts. The
faults that the environment names are planted for the last session alone; the one before it is clean and must pass.
"""

from __future__ import annotations

import functools
import json
import math
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

from flashrec.runtime.engine import Engine
from flashrec.runtime.flight import Flight
from flashrec.runtime.member import Member
from flashrec_harness import baselines, load
from flashrec_harness.baselines import Baseline, MeasuredSession
from flashrec_harness.faults import measuring
from flashrec_harness.outcome import Check, Outcome, SuiteContext
from flashrec_harness.perf import suite, worker
from flashrec_harness.perf.worker import Task
from flashrec_harness.planting import planted
from flashrec_harness.targets import resolve_catalog, resolve_model

_STORED = 4
_WORKLOAD_FILE = "workload.json"
_WORKLOAD = {
    "name": "simulated",
    "processes": 2,
    "rounds": 5,
    "warmup_rounds": 1,
    "prompts": 8,
    "reference_requests": 0,
    "cells": [{"n": 4, "concurrency": 2, "requests": 8}],
    "engine": {"invariance_check": False},
}
_WAVE_S, _ROW_S = 2e-3, 1e-4
_SESSION_SD, _PROCESS_SD, _WAVE_SD = 0.002, 0.002, 0.005


class SimulatedMachine:
    """A clock that moves when a wave runs or somebody waits, and the process that measures by it.

    :meth:`new_session` starts a session, a call one process of it, as :data:`flashrec_harness.perf.measure.RunTask`.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.new_session(0)

    def new_session(self, number: int) -> None:
        self._random = random.Random(f"session {number}")
        self._session = self._process = self._noise(_SESSION_SD)

    def _noise(self, deviation: float) -> float:
        return math.exp(self._random.gauss(0.0, deviation))

    def read(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def run_wave(self, members: list[Member]) -> None:
        """Let the time pass that a wave takes."""
        rows = sum(member.width for member in members)
        self.wait((_WAVE_S + rows * _ROW_S) * self._process * self._noise(_WAVE_SD))

    def __call__(self, task: Task, _: Path) -> Mapping[str, Any]:
        self._process = self._session * self._noise(_PROCESS_SD)
        return worker.measure(task)

    @contextmanager
    def in_charge(self) -> Iterator[None]:
        """This machine's clock in the place of the real one."""
        launch = Engine.launch

        def costly(engine: Engine, members: list[Member]) -> Flight:
            self.run_wave(members)
            return launch(engine, members)

        with (
            mock.patch.object(worker, "batches", functools.partial(load.batches, clock=self.read)),
            mock.patch.object(measuring, "clock", self.read),
            mock.patch.object(measuring, "wait", self.wait),
            mock.patch.object(Engine, "launch", costly),
        ):
            yield


def _session(number: int, machine: SimulatedMachine, directory: Path) -> list[Check]:
    """One invocation of the suite; its session file lies below ``directory``."""
    machine.new_session(number)
    model = resolve_model(None)
    context = SuiteContext(
        model_path=model,
        sid_vocab_file=resolve_catalog(model, None),
        out_dir=directory / f"session-{number}" / "perf",
        workload=str(directory / _WORKLOAD_FILE),
    )
    settings = suite.PerfSettings(baselines=directory / "baselines", reports=directory, run=machine)
    return suite.run(context, settings)


def _store(directory: Path) -> None:
    """A baseline of the sessions so far: the update command wants a clean commit and no fault named, and a trial has
    neither."""
    files = sorted(directory.glob("session-*/perf/session.json"))
    bodies = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    where, sessions = bodies[0]["environment"], [MeasuredSession(**body["session"]) for body in bodies]
    baseline = Baseline("simulated", where["hard"], where["soft"], where["info"], sessions)
    path = baselines.path_for(directory / "baselines", where["hard"]["device"], baseline.workload)
    path.parent.mkdir(parents=True)
    path.write_text(baselines.dump(baseline), encoding="utf-8")


def run(directory: Path) -> list[Check]:
    """The checks of the faulty session; those of the clean one instead, where they do not all pass."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / _WORKLOAD_FILE).write_text(json.dumps(_WORKLOAD), encoding="utf-8")
    machine = SimulatedMachine()
    with machine.in_charge():
        for number in range(_STORED):
            _session(number, machine, directory)
        _store(directory)
        clean = _session(_STORED, machine, directory)
        if any(check.outcome is not Outcome.PASS for check in clean):
            reason = "a clean session does not pass, so a faulty one shows nothing"
            return [Check("perf", "the clean session passes", Outcome.INVALID, "", reason=reason), *clean]
        with planted():
            return _session(_STORED + 1, machine, directory)


if __name__ == "__main__":
    found = run(Path(sys.argv[1]))
    Path(sys.argv[2]).write_text(json.dumps([asdict(check) for check in found], default=str), encoding="utf-8")
