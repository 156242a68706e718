"""Workloads: what is sent, how many at once, how often; one JSON file each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from flashrec.errors import ConfigError
from flashrec.request import ScoreSpace

Drive = Literal["batch", "closed", "open"]
"""``batch``: ``concurrency`` requests in lockstep; ``closed``: as many clients; ``open``: a Poisson stream."""

QUICK = "quick"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One operating point.

    ``context`` is the prompt length in random tokens, ``None`` for prompts from real histories.
    ``requests`` are sent per timed round. ``cache``: ``cold`` empties the prefix cache before each round.
    ``rate`` is requests per second of an open loop, ``target_ms`` the latency its goodput counts.
    ``anchor`` holds published figures of the same point (requests per second) for the report.
    """

    n: int
    concurrency: int = 1
    context: int | None = None
    requests: int = 16
    drive: Drive = "batch"
    cache: Literal["cold", "warm"] = "warm"
    rate: float | None = None
    target_ms: float | None = None
    max_tokens: int | None = None
    anchor: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("n", "concurrency", "requests"):
            if getattr(self, name) < 1:
                raise ConfigError(f"workload: {name} must be at least 1, got {getattr(self, name)}")
        if (self.drive == "open") != (self.rate is not None):
            raise ConfigError("workload: an open loop needs a rate, and only an open loop has one")

    @property
    def name(self) -> str:
        """Such as ``n=50, 8 at once, context 2465, cold, batch``; unique within a workload."""
        load = f"{self.rate:g}/s" if self.rate is not None else f"{self.concurrency} at once"
        prompt = "histories" if self.context is None else f"context {self.context}"
        return f"n={self.n}, {load}, {prompt}, {self.cache}, {self.drive}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Open loops at ``shares`` of the capacity that a closed loop of ``concurrency`` clients has, for ``seconds``
    each: how many requests of width ``n`` are answered within ``target_ms``. Reported, not compared with a baseline,
    since its rates are the machine's own.

    ``context`` is the prompt length in random tokens, each loop with an empty prefix cache; ``None`` for prompts from
    real histories, which stay cached. A server is asked by ``clients`` processes, by default as many as of a cell.
    """

    n: int
    shares: tuple[float, ...]
    target_ms: float
    context: int | None = None
    concurrency: int = 32
    seconds: float = 5.0
    clients: int | None = None

    def __post_init__(self) -> None:
        if self.clients is not None and not 1 <= self.clients <= self.concurrency:
            raise ConfigError("workload: sweep: clients must lie in 1 to concurrency")
        if not self.shares or min(self.shares) <= 0 or list(self.shares) != sorted(set(self.shares)):
            raise ConfigError("workload: sweep: shares must be rising and above 0")
        if not (self.target_ms > 0 and self.seconds > 0):
            raise ConfigError("workload: sweep: target_ms and seconds must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Cells that are measured together. ``engine`` overrides fields of ``EngineConfig``.

    ``prompts`` different prompts are sent in turn; a cell that is cold needs at least ``requests`` of them.
    ``reference_requests`` per round go to each yardstick of the same run (``transformers``; SGLang where
    ``SGLANG_BEAM_URL`` names a server); 0 leaves them out.
    ``anchor_device`` is the GPU that the cells' published figures are of.
    """

    name: str
    cells: tuple[Cell, ...]
    description: str = ""
    processes: int = 4
    rounds: int = 7
    warmup_rounds: int = 2
    prompts: int = 64
    score_space: ScoreSpace = ScoreSpace.SID
    seed: int = 0
    reference_requests: int = 4
    engine: Mapping[str, Any] = field(default_factory=dict)
    anchor_device: str = ""
    sweep: Sweep | None = None

    def __post_init__(self) -> None:
        if self.sweep is not None and self.sweep.n > max((cell.n for cell in self.cells), default=0):
            raise ConfigError(f"workload {self.name}: the sweep's n of {self.sweep.n} is wider than any cell's")
        if not self.cells:
            raise ConfigError(f"workload {self.name}: no cells")
        if self.processes < 2 or self.rounds < 2:
            raise ConfigError(f"workload {self.name}: at least 2 processes and 2 rounds, or there is no noise band")
        names = [cell.name for cell in self.cells]
        if len(set(names)) != len(names):
            raise ConfigError(f"workload {self.name}: two cells are the same point")
        for cell in self.cells:
            if cell.cache == "cold" and cell.requests > self.prompts:
                raise ConfigError(
                    f"workload {self.name}: {cell.name}: {cell.requests} cold requests need as many prompts"
                )

    def fingerprint(self) -> dict[str, Any]:
        """Flat hard keys: a baseline measured with any of them different is not comparable."""
        keys: dict[str, Any] = {
            "prompts": self.prompts,
            "rounds": self.rounds,
            "score_space": str(self.score_space),
            "seed": self.seed,
        } | {f"engine {name}": value for name, value in self.engine.items()}
        for index, cell in enumerate(self.cells):
            fields = asdict(cell)
            del fields["anchor"], fields["target_ms"]
            keys |= {f"cell {index} {name}": value for name, value in fields.items()}
        return keys

    def narrowed(self, beam: int | None, concurrency: int | None) -> Workload:
        """One cell at the given width and concurrency, otherwise like the first; a workload of its own."""
        if beam is None and concurrency is None:
            return self
        first = self.cells[0]
        width, at_once = beam or first.n, concurrency or first.concurrency
        cell = replace(
            first,
            n=width,
            concurrency=at_once,
            requests=max(first.requests, at_once),
            anchor={},
            drive="batch",
            rate=None,
        )
        return replace(self, name=f"{self.name}-n{width}-c{at_once}", cells=(cell,), sweep=None)


def from_json(body: Mapping[str, Any]) -> Workload:
    """Build a workload. Raises :class:`ConfigError` naming an unknown or missing key."""
    if not isinstance(body, Mapping):
        raise ConfigError(f"workload: a JSON object, got a {type(body).__name__}")
    try:
        cells = tuple(Cell(**cell) for cell in body["cells"])
        space = ScoreSpace(body.get("score_space", ScoreSpace.SID))
        sweep = body.get("sweep")
        if sweep is not None:
            sweep = Sweep(**{**sweep, "shares": tuple(sweep["shares"])})
        return Workload(**{**body, "cells": cells, "score_space": space, "sweep": sweep})
    except (TypeError, KeyError, ValueError) as error:
        raise ConfigError(f"workload {body.get('name', '?')}: {error}") from None


def names() -> list[str]:
    """The workloads that come with the harness."""
    folder = resources.files("flashrec_harness") / "workloads"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def load_workload(name_or_path: str) -> Workload:
    """By name (:func:`names`) or from a JSON file. Raises :class:`ConfigError` if there is neither."""
    path = Path(name_or_path)
    if path.suffix == ".json":
        if not path.is_file():
            raise ConfigError(f"workload {path}: no such file")
        text = path.read_text(encoding="utf-8")
    elif name_or_path in names():
        text = (resources.files("flashrec_harness") / "workloads" / f"{name_or_path}.json").read_text("utf-8")
    else:
        raise ConfigError(f"workload {name_or_path!r}: unknown; there are {', '.join(names())}, or name a JSON file")
    try:
        body = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"workload {name_or_path}: not JSON ({error})") from None
    return from_json(body)
