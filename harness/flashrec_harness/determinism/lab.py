"""Runs waves that hold a probe on an engine, and writes down what came out."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flashrec import Engine, EngineConfig, Request, Result, ScoreSpace
from flashrec_harness.determinism.records import (
    Observation,
    ProcessReport,
    ledger_digest,
    output_beams,
    output_digest,
    plain_ledger,
    wave_key,
)
from flashrec_harness.determinism.sharing import pool_settings
from flashrec_harness.determinism.task import Task
from flashrec_harness.material import Prompt

FREE_TOKENS = 3
"""Length of a search without a catalog."""

MAX_REQUESTS = 16
"""In a wave of this suite. A CPU's attention pays for each that there could be."""

_LISTED_SIDS = 4096


@dataclass(slots=True)
class Place:
    """Which axis a wave belongs to and what is special about it."""

    axis: str
    case: str


def engine_config(task: Task, **overrides: Any) -> EngineConfig:
    """The engine that a task's waves run on, with the ledger on.

    Its own proof at start-up is off: the suite is the judge, and an engine that refuses to start shows less.
    """
    return EngineConfig(
        model_path=Path(task.model_path),
        sid_vocab_file=Path(task.sid_vocab_file) if task.sid_vocab_file else None,
        sid=task.sid,
        **{
            "record_ledger": True,
            "invariance_check": False,
            "max_requests": MAX_REQUESTS,
            **pool_settings(),
            **overrides,
        },
    )


class Lab:
    """One process's requests and report."""

    def __init__(self, task: Task, report: ProcessReport) -> None:
        self.task = task
        self.report = report
        self._page = EngineConfig(model_path=Path(task.model_path)).page_tokens

    @property
    def constrained(self) -> bool:
        """Whether the search follows a catalog."""
        return self.task.sid_vocab_file is not None

    @contextmanager
    def engine(self, **overrides: Any) -> Iterator[Engine]:
        """The task's engine, closed at the end."""
        engine = Engine(engine_config(self.task, **overrides))
        try:
            yield engine
        finally:
            engine.close()

    def request(self, prompt: Prompt, n: int, **fields: Any) -> Request:
        """A fresh request: nothing in the engine may remember an earlier one by its identity."""
        length = None if self.constrained else FREE_TOKENS
        return Request(input_ids=tuple(prompt), n=n, max_tokens=length, **fields)

    def probe(self, name: str, engine: Engine) -> Request:
        """The probe called ``name``, the same bits in every process.

        ``default``; ``width N``, with N beams; a score space's name; ``allow`` and ``exclude``, with that list;
        ``seeded``, sampled; ``tied``, the default on weights that tie; ``quantised``, on weights in FP8.
        """
        prompt, width = self.task.prompts[0], self.task.width
        if name in set(ScoreSpace):
            return self.request(prompt, width, score_space=ScoreSpace(name))
        if name in ("allow", "exclude"):
            return self.request(prompt, width, **{f"{name}_sids": self._listed(engine)})
        if name == "seeded":
            return self.request(prompt, width, temperature=0.8, seed=20)
        kind, _, beams = name.partition(" ")
        return self.request(prompt, int(beams) if kind == "width" else width)

    def _listed(self, engine: Engine) -> tuple[tuple[int, ...], ...]:
        """Every other SID of the catalog, at most 4,096 of them, evenly spread."""
        assert engine.catalog is not None
        sids = engine.catalog.sids
        step = max(2, -(-len(sids) // _LISTED_SIDS))
        return tuple(tuple(codes) for codes in sids[1::step].tolist())

    def widest(self, engine: Engine) -> int:
        """Beams of a request that the search can fill."""
        found = engine.parts.limits.vocab_size // 2 if engine.catalog is None else engine.catalog.num_sids
        return min(found, engine.config.max_beam_width)

    def mates(
        self, rng: random.Random, rows: int, *, most: int = MAX_REQUESTS - 1, widest: int | None = None, **fields: Any
    ) -> list[Request]:
        """At most ``most`` requests of ``rows`` beams together: tails of prompts and near twins of the probe.

        None has more than ``widest`` beams, unless ``most`` of them then could not have ``rows`` together.
        """
        found: list[Request] = []
        limit = rows if widest is None else max(widest, -(-rows // max(most, 1)))
        wide = min(limit, max(24, rows // 4))
        while rows > 0:
            left = most - 1 - len(found)
            width = min(max(rng.randint(1, wide), rows - left * limit), rows) if left else rows
            found.append(self.request(self.mate_prompt(rng), width, **fields))
            rows -= width
        return found

    def mate_prompt(self, rng: random.Random) -> Prompt:
        """Somebody else's prompt; one in three is the probe's with one token changed, often a page's last."""
        prompts = self.task.prompts
        if rng.random() < 1 / 3:
            changed = list(prompts[0])
            ends = range(self._page - 1, len(changed), self._page)
            where = rng.choice(ends) if ends and rng.random() < 0.5 else rng.randrange(len(changed))
            changed[where] = rng.choice(prompts[-1])
            return tuple(changed)
        prompt = rng.choice(prompts)
        return prompt[rng.randrange(len(prompt)) :]

    def wave(
        self,
        engine: Engine,
        place: Place,
        probe: str,
        mates: Sequence[Request],
        rng: random.Random,
        *,
        at: int | None = None,
    ) -> Result:
        """Run the probe among ``mates``, in place ``at`` or at random, and record its bits."""
        requests = list(mates)
        position = rng.randint(0, len(requests)) if at is None else at
        requests.insert(position, replace(self.probe(probe, engine), rid=probe))
        waves = engine.stats()["waves"]
        result = engine.generate(requests)[position]
        if engine.stats()["waves"] == waves + 1:
            self.report.count(place.axis, "waves")
        self.observe(engine, place, result, requests)
        return result

    def observe(
        self, engine: Engine, place: Place, result: Result, requests: Sequence[Request], *, scheduled: bool = False
    ) -> None:
        """Write down the bits of the probe that ``result`` answers, the one of ``requests`` that has its ``rid``.

        If they were ``scheduled`` nobody knows which of them shared its wave.
        """
        probe, report = result.rid, self.report
        beams = output_beams(result.beams)
        ledger = plain_ledger(engine.ledgers.get(probe, ()))
        engine.ledgers.clear()
        output, steps = output_digest(beams), ledger_digest(ledger)
        report.outputs[output] = beams
        report.ledgers[steps] = ledger
        key = wave_key(probe, output)
        if key not in report.waves:
            report.waves[key] = [asdict(one) for one in requests]
        rows = 0 if scheduled else sum(one.n for one in requests)
        at = 0 if scheduled else [one.rid for one in requests].index(probe)
        report.observations.append(
            Observation(place.axis, place.case, probe, output, steps, rows, len(requests), at, result.cached_tokens)
        )


AxisRun = Callable[[Lab, Engine], None]
