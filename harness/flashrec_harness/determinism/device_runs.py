"""Waves that only a GPU can run: without captured graphs, and under random device spins."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from flashrec import Engine
from flashrec_harness.determinism.lab import Lab, Place

_MAX_SPIN_CYCLES = 2_000_000


def eager(lab: Lab, engine: Engine) -> None:
    for turn in range(4):
        rng = lab.task.rng("eager", turn)
        lab.wave(engine, Place("eager", f"turn {turn}"), "default", lab.mates(rng, 15 * turn), rng)
    stats = engine.stats()
    lab.report.count("eager", "eager waves", stats["eager_waves"])
    lab.report.count("eager", "graph replays", stats["graph_replays"])


@contextmanager
def spins(engine: Engine, rng: random.Random) -> Iterator[None]:
    """Random busy-waits on the device before every pass, on its stream and beside it.

    They move the device against the host: what the host overwrites too early, or reads before an event, shows.
    """
    beside = torch.cuda.Stream()
    told = engine.profiler.on_forward

    def on_forward(*arguments: Any) -> None:
        told(*arguments)
        if rng.random() < 0.7:
            torch.cuda._sleep(rng.randrange(_MAX_SPIN_CYCLES))
        with torch.cuda.stream(beside):
            torch.cuda._sleep(rng.randrange(_MAX_SPIN_CYCLES))

    with mock.patch.object(engine.profiler, "on_forward", on_forward):
        yield
    torch.cuda.synchronize()


def jitter(lab: Lab, engine: Engine) -> None:
    for turn in range(5 if lab.task.quick else 15):
        rng = lab.task.rng("jitter", turn)
        with spins(engine, rng):
            lab.wave(engine, Place("jitter", f"turn {turn}"), "default", lab.mates(rng, rng.randint(0, 50)), rng)
