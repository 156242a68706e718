"""What one process of the suite is told to do, and the prompts that all of them share."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flashrec import EngineConfig
from flashrec_harness.material import Material, Prompt
from flashrec_harness.outcome import SuiteContext

PROCESSES = 4
RUNS = 30
"""Mixed waves of each process: 120 in all (SPEC H2)."""

_PROMPTS = 12
_RANDOM_TOKENS = 90
_PAGES = 3
"""Whole pages of the shortest prompt: fewer would leave nothing between a full hit and none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """``prompts[0]`` is the probe's. ``width`` is its ``n``; ``max_rows`` bounds a wave, but not those that try a
    larger row bucket.

    ``axes`` are those of this process, in order. A value that should differ between processes comes from
    :meth:`rng`; what must be the same in all of them, from :meth:`shared_rng`.
    """

    process: int
    processes: int
    seed: int
    quick: bool
    model_path: str
    sid_vocab_file: str | None
    sid: str | None
    prompts: tuple[Prompt, ...]
    width: int
    max_rows: int
    runs: int
    axes: tuple[str, ...]

    @classmethod
    def of(cls, body: dict[str, Any]) -> Task:
        """From JSON data."""
        prompts = tuple(tuple(prompt) for prompt in body["prompts"])
        return cls(**{**body, "prompts": prompts, "axes": tuple(body["axes"])})

    def rng(self, *names: object) -> random.Random:
        """Seeded by the run's seed, this process and ``names``, whatever ``PYTHONHASHSEED`` says."""
        return random.Random("/".join(map(str, (self.seed, self.process, *names))))

    def shared_rng(self, *names: object) -> random.Random:
        """As :meth:`rng`, the same in every process."""
        return random.Random("/".join(map(str, (self.seed, *names))))


def suite_prompts(context: SuiteContext, material: Material) -> tuple[Prompt, ...]:
    """Prompts of held-out histories where the checkpoint has them, else of random tokens; the longest first.

    One that is short of three pages goes on with the next ones.
    """
    has_histories = material.catalog is not None and material.sequences.is_file()
    prompts = (
        material.history_prompts(8 * _PROMPTS)
        if has_histories
        else material.random_prompts(_PROMPTS, _RANDOM_TOKENS, context.seed)
    )
    longest = sorted(prompts, key=len, reverse=True)[:_PROMPTS]
    shortest = _PAGES * EngineConfig(model_path=context.model_path).page_tokens + 1
    return tuple(sorted((_prolonged(longest, index, shortest) for index in range(len(longest))), key=len, reverse=True))


def _prolonged(prompts: Sequence[Prompt], index: int, tokens: int) -> Prompt:
    joined = list(prompts[index])
    while len(joined) < tokens:
        index = (index + 1) % len(prompts)
        joined += prompts[index]
    return tuple(joined)


def make_tasks(
    context: SuiteContext, prompts: tuple[Prompt, ...], axes: tuple[str, ...], everywhere: frozenset[str]
) -> list[Task]:
    """One task per process. In the quick form the axes that are not in ``everywhere`` are dealt out, one process
    each; else every process runs all."""
    dealt = [name for name in axes if name not in everywhere]
    return [
        Task(
            process=process,
            processes=PROCESSES,
            seed=context.seed,
            quick=context.quick,
            model_path=str(context.model_path),
            sid_vocab_file=str(context.sid_vocab_file) if context.sid_vocab_file else None,
            sid=context.sid,
            prompts=prompts,
            width=20 if context.quick else 40,
            max_rows=64 if context.quick else 224,
            runs=RUNS,
            axes=tuple(
                name
                for name in axes
                if name in everywhere or not context.quick or dealt.index(name) % PROCESSES == process
            ),
        )
        for process in range(PROCESSES)
    ]
