"""Search without a catalog against its rules written out in plain Python, over tables instead of a model (SPEC B4).

The rules are those of ``transformers`` 5.24.0 (``_beam_search``, ``early_stopping="never"``) and of SGLang 0.5.21.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tiny_checkpoint import write_checkpoint

from flashrec import Engine, EngineConfig, Request, Result, ScoreSpace
from flashrec.request import Semantics
from flashrec.runtime.member import Member, WaveKey
from flashrec.runtime.results import free_results
from flashrec.search.free import FreeSearch

Tokens = tuple[int, ...]
GAP = 1e-5
"""Searches that compare float64 numbers closer than this are left out."""
INF = math.inf


@dataclass(frozen=True)
class Task:
    """A search over ``vocab`` tokens whose logits after a prefix are drawn from ``seed`` and the prefix."""

    vocab: int
    width: int
    steps: int
    stops: frozenset[int]
    semantics: Semantics = "transformers"
    length_penalty: float = 1.0
    seed: int = 0

    def logits(self, prefix: Tokens) -> torch.Tensor:
        return _logits(self.vocab, self.seed, prefix)

    def penalised(self, total: float, length: int) -> float:
        return float(total / length**self.length_penalty)


@functools.cache
def _logits(vocab: int, seed: int, prefix: Tokens) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng((seed, *prefix)).normal(size=vocab) * 2).float()


@dataclass(frozen=True)
class Hypothesis:
    """A finished hypothesis; ``score`` is penalised."""

    tokens: Tokens
    score: float
    reason: str


class ByTheRules:
    """The search in float64; ``gap`` is the smallest difference between numbers that it compared."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.gap = INF

    def run(self) -> list[Hypothesis]:
        if self.task.width == 1:
            return self.greedy()
        return self.transformers() if self.task.semantics == "transformers" else self.sglang()

    def extended(self, running: list[tuple[Tokens, float]], count: int) -> list[tuple[Tokens, float]]:
        """The best ``count`` extensions of all rows together: by sum, parent rank, token id."""
        found = []
        for rank, (prefix, total) in enumerate(running):
            log_probs = torch.log_softmax(self.task.logits(prefix).double(), 0).tolist()
            found += [(-(total + value), rank, token, prefix) for token, value in enumerate(log_probs)]
        found.sort()
        self._compared([entry[0] for entry in found[: count + 1]])
        return [((*prefix, token), -negative) for negative, _, token, prefix in found[:count]]

    def _compared(self, values: list[float]) -> None:
        ordered = sorted(values)
        self.gap = min([self.gap, *(b - a for a, b in itertools.pairwise(ordered))])

    def is_stop(self, tokens: Tokens) -> bool:
        return tokens[-1] in self.task.stops

    def greedy(self) -> list[Hypothesis]:
        task = self.task
        tokens, total = (), 0.0
        for step in range(1, task.steps + 1):
            ((tokens, total),) = self.extended([(tokens, total)], 1)
            if self.is_stop(tokens) and (step < task.steps or task.semantics == "transformers"):
                return [Hypothesis(tokens, task.penalised(total, step), "stop")]
        return [Hypothesis(tokens, task.penalised(total, task.steps), "length")]

    def transformers(self) -> list[Hypothesis]:
        task = self.task
        running: list[tuple[Tokens, float]] = [((), 0.0)]
        pool: list[Hypothesis] = []
        for step in range(1, task.steps + 1):
            candidates = self.extended(running, max(2, 1 + len(task.stops)) * task.width)
            last = step == task.steps
            running = [entry for entry in candidates if not self.is_stop(entry[0])][: task.width]
            for tokens, total in candidates[: task.width]:
                if last or self.is_stop(tokens):
                    reason = "stop" if self.is_stop(tokens) else "length"
                    pool.append(Hypothesis(tokens, task.penalised(total, step), reason))
            self._compared([entry.score for entry in pool])
            pool = sorted(pool, key=lambda entry: -entry.score)[: task.width]
            if len(pool) == task.width and not last:
                horizon = task.steps if task.length_penalty > 0 else step
                reachable = task.penalised(running[0][1], horizon) if running else -INF
                self.gap = min(self.gap, abs(reachable - pool[-1].score))
                if reachable <= pool[-1].score:
                    break
        return pool

    def sglang(self) -> list[Hypothesis]:
        task = self.task
        running: list[tuple[Tokens, float]] = [((), 0.0)]
        pool: list[Hypothesis] = []

        def bank(entry: tuple[Tokens, float], reason: str) -> None:
            pool.append(Hypothesis(entry[0], task.penalised(entry[1], len(entry[0])), reason))

        for _ in range(task.steps - 1):
            survivors: list[tuple[Tokens, float]] = []
            for entry in self.extended(running, 2 * task.width):
                if not self.is_stop(entry[0]):
                    survivors.append(entry)
                elif len(survivors) < task.width:
                    bank(entry, "stop")
            running = survivors[: task.width]
            if len(running) < task.width:
                for entry in running:
                    bank(entry, "length")
                break
        else:
            for entry in self.extended(running, task.width):
                bank(entry, "length")
        self._compared([entry.score for entry in pool])
        return sorted(pool, key=lambda entry: -entry.score)[: task.width]


def searched(task: Task) -> list[Hypothesis]:
    """The engine's search, ranked as the engine ranks it."""
    search = FreeSearch(
        width=task.width,
        steps=task.steps,
        stop_tokens=tuple(task.stops),
        length_penalty=task.length_penalty,
        semantics=task.semantics,
        device=torch.device("cpu"),
    )
    prefixes: list[Tokens] = [()]
    for _ in range(task.steps):
        parent, token = search.advance(torch.stack([task.logits(prefix) for prefix in prefixes]))
        prefixes = [(*prefixes[p], t) for p, t in zip(parent.tolist(), token.tolist(), strict=True)]
    request = Request(input_ids=(0,), n=task.width, length_penalty=task.length_penalty, semantics=task.semantics)
    key = WaveKey(False, ScoreSpace.VOCAB, task.steps)
    member = Member(request, np.zeros(1, dtype=np.int32), task.width, key, tuple(task.stops), None)
    (result,) = free_results([member], [search.bank])
    assert isinstance(result, Result)
    return [Hypothesis(beam.token_ids, beam.score, beam.finish_reason) for beam in result.beams]


@st.composite
def tasks(draw: st.DrawFn, semantics: Semantics) -> Task:
    vocab = draw(st.integers(4, 14))
    return Task(
        vocab=vocab,
        width=draw(st.integers(1, vocab // 2)),
        steps=draw(st.integers(1, 5)),
        stops=frozenset(draw(st.sets(st.integers(0, vocab - 1), max_size=3))),
        semantics=semantics,
        length_penalty=1.0 if semantics == "sglang" else draw(st.sampled_from([1.0, 0.0, 0.5, 2.0, -1.0])),
        seed=draw(st.integers(0, 2**16)),
    )


def assert_follows_the_rules(task: Task) -> None:
    rules = ByTheRules(task)
    wanted = rules.run()
    assume(rules.gap > GAP)
    found = searched(task)
    assert [(one.tokens, one.reason) for one in found] == [(one.tokens, one.reason) for one in wanted]
    assert [one.score for one in found] == pytest.approx([one.score for one in wanted], rel=1e-5, abs=1e-4)


@given(tasks("transformers"))
def test_transformers_semantics(task: Task) -> None:
    assert_follows_the_rules(task)


@given(tasks("sglang"))
def test_sglang_semantics(task: Task) -> None:
    assert_follows_the_rules(task)


def outcomes(semantics: Semantics) -> list[list[Hypothesis]]:
    """Searches in which a third of the steps offers a stop token among the best."""
    return [
        ByTheRules(Task(12, 4, 4, frozenset({1, 5, 7}), semantics=semantics, seed=seed)).run() for seed in range(40)
    ]


def test_the_semantics_differ_where_stop_tokens_can_be_emitted() -> None:
    """So that either test above would notice the other's rules."""
    one, other = outcomes("transformers"), outcomes("sglang")
    assert sum(a != b for a, b in zip(one, other, strict=True)) > 10


def test_searches_end_early_and_at_every_length() -> None:
    """The tasks reach the branches that they are meant for."""
    lengths = {len(entry.tokens) for pool in outcomes("transformers") for entry in pool}
    assert lengths == {1, 2, 3, 4}
    early = [pool for pool in outcomes("transformers") if all(entry.reason == "stop" for entry in pool)]
    assert early


def test_without_stop_tokens_both_semantics_are_one() -> None:
    kinds: tuple[Semantics, Semantics] = ("transformers", "sglang")
    for seed in range(10):
        one, other = (searched(Task(10, 3, 3, frozenset(), semantics=kind, seed=seed)) for kind in kinds)
        assert one == other
        assert len(one) == 3


@pytest.mark.parametrize("semantics", ["transformers", "sglang"])
def test_width_one_is_greedy(semantics: Semantics) -> None:
    """A beam search one wide would bank the stop token and go on with the runner-up."""
    ended = 0
    for seed in range(30):
        task = Task(8, 1, 4, frozenset({2, 3}), semantics=semantics, seed=seed)
        (found,) = searched(task)
        prefix: Tokens = ()
        while len(prefix) < 4 and not (prefix and prefix[-1] in task.stops):
            prefix = (*prefix, int(task.logits(prefix).argmax()))
        assert found.tokens == prefix
        ended += len(prefix) < 4
    assert ended > 5


def test_ties_go_to_the_lower_parent_then_the_lower_token() -> None:
    search = FreeSearch(
        width=3, steps=2, stop_tokens=(), length_penalty=1.0, semantics="transformers", device=torch.device("cpu")
    )
    parent, token = search.advance(torch.zeros(1, 7))
    assert (parent.tolist(), token.tolist()) == ([0, 0, 0], [0, 1, 2])
    search.advance(torch.tensor([[0.0] * 7, [5.0, 5.0, 0.0, 0.0, 0.0, 0.0, 0.0], [0.0] * 7]))
    assert search.bank.tokens.tolist() == [[1, 0], [1, 1], [0, 0]]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path: Path = write_checkpoint(tmp_path_factory.mktemp("free"), layers=1)
    return Engine(EngineConfig(model_path=path, device="cpu", max_beam_width=48, invariance_check=False))


def test_requests_of_a_wave_keep_their_own_rules(engine: Engine) -> None:
    base = {"input_ids": (5, 9, 33, 2), "max_tokens": 4, "ignore_eos": False, "stop_token_ids": (7, 11, 30)}
    requests = [
        Request(**base, n=6),
        Request(**base, n=2, semantics="sglang"),
        Request(**base | {"input_ids": (8, 8)}, n=24, length_penalty=2.0),
        Request(**base, n=1),
    ]
    alone = [engine.generate([request])[0].beams for request in requests]
    before = engine.stats()["waves"]
    together = engine.generate(requests)
    assert engine.stats()["waves"] == before + 1
    assert [result.beams for result in together] == alone


@pytest.mark.parametrize(
    ("semantics", "ignore_eos", "wanted"),
    [
        ("transformers", False, {1, 7}),
        ("transformers", True, {7}),
        ("sglang", False, {1, 7}),
        ("sglang", True, set()),
    ],
)
def test_stop_tokens_of_a_request(engine: Engine, semantics: Semantics, ignore_eos: bool, wanted: set[int]) -> None:
    request = Request(input_ids=(1,), max_tokens=2, stop_token_ids=(7,), semantics=semantics, ignore_eos=ignore_eos)
    assert set(engine.prepare(request).stop_tokens) == wanted
