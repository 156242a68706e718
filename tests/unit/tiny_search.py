"""Catalog searches over small random tries without a model, and the same searches in plain Python.

The "model" is a table: the hidden state of a prefix is drawn from a generator seeded by the prompt and the
prefix, so both sides can ask for it in any order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from flashrec import ScoreSpace
from flashrec.search.expand import Frontier, Sampling, Spans, expand
from flashrec.search.filters import FilterBuffers, LeafFilter
from flashrec.search.levels import build_levels, head_levels, trie_levels
from flashrec.sid import SidLayout, Trie, build_trie

HIDDEN = 6
Codes = tuple[int, ...]


@dataclass(frozen=True)
class Ask:
    """One request of a wave; ``prompt`` seeds its hidden states."""

    prompt: int = 0
    n: int = 3
    leaf_filter: LeafFilter | None = None
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Hit:
    """One returned SID with its summed log-probability."""

    codes: Codes
    score: float


@dataclass(frozen=True)
class World:
    """A catalog and a head. The token ids of the codebooks lie scattered, in no order."""

    sids: NDArray[np.int32]
    sizes: tuple[int, ...]
    layout: SidLayout
    trie: Trie
    head: torch.Tensor
    flat: bool
    """Every hidden state is the same vector of ones, so that equal head rows give equal scores."""
    hidden_states: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    @classmethod
    def make(cls, sids: Sequence[Codes], sizes: Sequence[int], seed: int, *, head: torch.Tensor | None = None) -> World:
        """``head`` [vocabulary, HIDDEN], where it matters, replaces a random one and makes the world flat."""
        rng = np.random.default_rng(seed)
        vocabulary = sum(sizes) + 4
        tokens = rng.permutation(vocabulary).astype(np.int32)
        stops = np.cumsum([0, *sizes])
        books = tuple(tokens[start:stop] for start, stop in itertools.pairwise(stops))
        texts = tuple(tuple(f"<{level}_{code}>" for code in range(size)) for level, size in enumerate(sizes))
        rows = np.array(sorted(set(sids)), dtype=np.int32)
        drawn = torch.from_numpy(rng.normal(size=(vocabulary, HIDDEN))).float()
        return cls(
            sids=rows,
            sizes=tuple(sizes),
            layout=SidLayout(books, texts, begin=int(tokens[-1]), end=int(tokens[-2])),
            trie=build_trie(rows, tuple(sizes)),
            head=drawn if head is None else head,
            flat=head is not None,
        )

    def hidden(self, prompt: int, prefix: Codes) -> torch.Tensor:
        """float32 [HIDDEN]."""
        if self.flat:
            return torch.ones(HIDDEN)
        key = (prompt, *prefix)
        if key not in self.hidden_states:
            drawn = np.random.default_rng(key).normal(size=HIDDEN)
            self.hidden_states[key] = torch.from_numpy(drawn).float()
        return self.hidden_states[key]


@dataclass(frozen=True)
class Outcome:
    """``hits`` per request, best first, and the final frontier for comparisons of bits."""

    hits: list[list[Hit]]
    frontier: Frontier


def search(
    world: World,
    asks: Sequence[Ask],
    space: ScoreSpace = ScoreSpace.SID,
    *,
    dense: bool = True,
    score_end: bool = False,
    padding: int = 3,
) -> Outcome:
    """Run one wave; ``padding`` rows before, between and after the requests' lie in no span."""
    cells = 1 << 20 if dense else 0
    levels = build_levels(
        head_levels(world.layout, world.head, space, score_end=score_end),
        trie_levels(world.trie, world.head.device, score_end=score_end, dense_cells=cells),
    )
    widths = [ask.n for ask in asks]
    starts = [padding * (index + 1) + sum(widths[:index]) for index in range(len(asks))]
    target, rows = list(zip(starts, widths, strict=True)), padding * (len(asks) + 1) + sum(widths)
    owner = torch.zeros(rows, dtype=torch.int64)
    for index, (start, width) in enumerate(target):
        owner[start : start + width] = index
    capacity = len(asks) * len(world.sids)
    filters = FilterBuffers(capacity, len(asks), torch.device("cpu"))
    wave_filters = filters.load([ask.leaf_filter for ask in asks])
    sampling = None
    if any(ask.temperature > 0 for ask in asks):
        heat = [1.0 / ask.temperature if ask.temperature > 0 else 0.0 for ask in asks]
        sampling = Sampling(torch.tensor(heat), torch.tensor([ask.seed for ask in asks]))
    zeros = torch.zeros(len(asks))
    frontier = Frontier(
        node=torch.zeros(len(asks), dtype=torch.int32),
        score=zeros,
        valid=torch.ones(len(asks), dtype=torch.bool),
        phi=None if sampling is None else zeros,
        noisy=None if sampling is None else zeros,
    )
    spans = _spans([(index, 1) for index in range(len(asks))], target, torch.arange(len(asks)), rows)
    prefixes: list[Codes] = [()] * len(asks)
    prompts = [ask.prompt for ask in asks]
    for level in levels:
        states = [world.hidden(prompt, prefix) for prompt, prefix in zip(prompts, prefixes, strict=True)]
        # One product per row: the batch cannot change a row's bits before the search sees them.
        logits = torch.stack([level.weight @ state for state in states])
        found = expand(logits, level, frontier, spans, wave_filters, sampling)
        frontier = found.frontier
        prefixes = [(*prefixes[p], c) for p, c in zip(found.parent.tolist(), found.code.tolist(), strict=True)]
        prompts = [asks[index].prompt for index in owner.tolist()]
        outside = torch.ones(rows, dtype=torch.bool)
        for start, width in target:
            outside[start : start + width] = False
        assert not frontier.valid[outside].any(), "a row in no span became valid"
        # Whatever stands in such rows must not reach a result.
        frontier.valid[outside], frontier.score[outside] = True, 1e6
        spans = _spans(target, target, owner, rows)
    hits = [
        [
            Hit(tuple(world.sids[int(frontier.node[row])].tolist()), float(frontier.score[row]))
            for row in range(start, start + width)
            if frontier.valid[row]
        ]
        for start, width in target
    ]
    for (start, width), found_hits in zip(target, hits, strict=True):
        assert frontier.valid[start : start + len(found_hits)].all(), "valid rows are not a prefix of the span"
        paths = [prefixes[row][: world.trie.depth] for row in range(start, start + width)][: len(found_hits)]
        assert [hit.codes for hit in found_hits] == paths, "nodes do not follow parents and codes"
    return Outcome(hits, frontier)


def _spans(source: list[tuple[int, int]], target: list[tuple[int, int]], request: torch.Tensor, rows: int) -> Spans:
    table = torch.tensor([[*one, *other] for one, other in zip(source, target, strict=True)], dtype=torch.int32).T
    return Spans(source, target, table.contiguous(), request, rows)


@dataclass(frozen=True)
class BruteForce:
    """``hits``, best first, and the smallest gap between scores that were compared and differ."""

    hits: list[Hit]
    gap: float


def legal_sids(world: World, leaf_filter: LeafFilter | None) -> set[Codes]:
    """The SIDs that a request may return."""
    every = [tuple(row) for row in world.sids.tolist()]
    if leaf_filter is None:
        return set(every)
    listed = {every[rank] for rank in leaf_filter.ranks.tolist()}
    return listed if leaf_filter.allow else set(every) - listed


def brute_force(world: World, ask: Ask, space: ScoreSpace, *, score_end: bool = False) -> BruteForce:
    """The search at temperature 0 in float64: extend, sort by (score, parent rank, token id), cut."""
    allowed = legal_sids(world, ask.leaf_filter)
    beams: list[tuple[Codes, float]] = [((), 0.0)]
    gap = math.inf
    for level in range(len(world.sizes)):
        candidates = []
        for rank, (prefix, score) in enumerate(beams):
            log_probs = step_log_probs(world, ask.prompt, prefix, space, allowed, score_end=score_end)
            for code, log_prob in log_probs.items():
                token = int(world.layout.codebooks[level][code])
                candidates.append((-(score + log_prob), rank, token, (*prefix, code)))
        candidates.sort()
        gaps = [b[0] - a[0] for a, b in itertools.pairwise(candidates) if b[0] > a[0]]
        gap = min([gap, *gaps])
        beams = [(codes, -negative) for negative, _, _, codes in candidates[: ask.n]]
    if score_end:
        beams = [(codes, score + end_log_prob(world, ask.prompt, codes, space)) for codes, score in beams]
        beams.sort(key=lambda beam: -beam[1])
        gap = min([gap, *(a[1] - b[1] for a, b in itertools.pairwise(beams))])
    return BruteForce([Hit(codes, score) for codes, score in beams], gap)


def step_log_probs(
    world: World, prompt: int, prefix: Codes, space: ScoreSpace, allowed: set[Codes], *, score_end: bool = False
) -> dict[int, float]:
    """Log-probability of every code that may follow ``prefix``."""
    level = len(prefix)
    logits = _logits(world, prompt, prefix)
    codes = sorted({sid[level] for sid in allowed if sid[:level] == prefix})
    if not codes:
        return {}
    book = world.layout.codebooks[level].tolist()
    normaliser = _log_sum_exp([logits[token] for token in _softmax_tokens(world, level, space, codes, score_end)])
    return {code: logits[book[code]] - normaliser for code in codes}


def end_log_prob(world: World, prompt: int, codes: Codes, space: ScoreSpace) -> float:
    """Log-probability of the end token after a whole SID."""
    if space in (ScoreSpace.LEVEL, ScoreSpace.CHILDREN):
        return 0.0
    logits = _logits(world, prompt, codes)
    tokens = _softmax_tokens(world, len(codes) - 1, space, [], True)
    return logits[int(world.layout.end or 0)] - _log_sum_exp([logits[token] for token in tokens])


def _softmax_tokens(
    world: World, level: int, space: ScoreSpace, codes: Sequence[int], score_end: bool
) -> Sequence[int]:
    books = [book.tolist() for book in world.layout.codebooks]
    if space is ScoreSpace.VOCAB:
        return range(len(world.head))
    if space is ScoreSpace.SID:
        ends = [int(world.layout.end or 0)] if score_end else []
        return [*itertools.chain.from_iterable(books), *ends]
    if space is ScoreSpace.LEVEL:
        return list(books[level])
    return [books[level][code] for code in codes]


def _logits(world: World, prompt: int, prefix: Codes) -> list[float]:
    values: list[float] = (world.head.double() @ world.hidden(prompt, prefix).double()).tolist()
    return values


def _log_sum_exp(values: Sequence[float]) -> float:
    peak = max(values)
    return peak + math.log(math.fsum(math.exp(value - peak) for value in values))
