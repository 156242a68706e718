"""The device spins, with the device replaced: where they are put, and that they leave nothing behind."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from random_shop import MakeTask

from flashrec_harness.determinism.axes import AXES
from flashrec_harness.determinism.device_runs import spins
from flashrec_harness.determinism.judge import judge
from flashrec_harness.determinism.lab import Lab, Place
from flashrec_harness.determinism.records import ProcessReport
from flashrec_harness.determinism.worker import perform
from flashrec_harness.outcome import Outcome


class Device:
    """Counts what would have been queued on a GPU, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        monkeypatch.setattr(torch.cuda, "Stream", lambda: "beside")
        monkeypatch.setattr(torch.cuda, "stream", self._stream)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda _: self.events.append("spin"))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.events.append("synchronize"))

    def _stream(self, name: str) -> AbstractContextManager[None]:
        self.events.append(name)
        return nullcontext()


def test_every_pass_is_preceded_by_spins(make_task: MakeTask, monkeypatch: pytest.MonkeyPatch) -> None:
    device, task = Device(monkeypatch), make_task()
    report = ProcessReport(0, "0", 1, "cpu")
    lab = Lab(task, report)
    with lab.engine() as engine:
        told = engine.profiler.on_forward
        with spins(engine, random.Random(1)):
            lab.wave(engine, Place("jitter", "one"), "default", lab.mates(random.Random(1), 9), random.Random(2))
        assert engine.profiler.on_forward == told
        passes = device.events.count("beside")
        assert passes == 2, "one prefill pass, one announcement of the decode passes"
        assert passes < device.events.count("spin") <= 2 * passes
        assert device.events[-1] == "synchronize"
        assert engine.profiler.forward_passes == 1 + 2


def test_without_a_graph_the_eager_axis_shows_nothing(make_task: MakeTask) -> None:
    """On a CPU nothing is captured, so the axis must come out invalid and not as a pass."""
    task = make_task("eager")
    checks = {check.name: check for check in judge([perform(task)], [task])}
    eager = checks[AXES["eager"].title]
    assert eager.outcome is Outcome.INVALID
    assert "reference waves from graphs" in eager.reason
