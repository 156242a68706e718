"""One step of a catalog search: score the legal continuations of every row, keep each request's best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from flashrec.kernels.ops import TORCH, Ops
from flashrec.kernels.trie_expand import Children, Hypotheses, LeafLists
from flashrec.search.filters import FilterSet
from flashrec.search.levels import Level
from flashrec.search.numerics import gumbel, log_sum_exp, mix64, order_key


@dataclass(frozen=True, slots=True, eq=False)
class Frontier:
    """N hypotheses: trie ``node`` int32, summed log-probability ``score`` float32, ``valid`` bool, each [N].

    ``phi`` and ``noisy`` float32 [N] are the tempered log-probability and its Gumbel-perturbed value, in a
    wave that samples. The rows of a request lie together in rank order.
    """

    node: torch.Tensor
    score: torch.Tensor
    valid: torch.Tensor
    phi: torch.Tensor | None = None
    noisy: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Which rows belong to which request before (``source``) and after (``target``) a step.

    Host lists of (start, count), the same on the device as ``table`` int32 [4, R] (source start, source count,
    target start, target count; a count of 0 is inert), and ``request`` int64 [N], the request of each source
    row. ``target_rows`` is the size of the arrays after the step; rows in no span stay invalid.
    ``source_width`` is the most source rows that a request can have, ``None`` for all of them.
    """

    source: Sequence[tuple[int, int]]
    target: Sequence[tuple[int, int]]
    table: torch.Tensor
    request: torch.Tensor
    target_rows: int
    source_width: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Sampling:
    """Temperature 0 for a request means: no noise. ``inv_temperature`` float32 [R], ``seed`` int64 [R]."""

    inv_temperature: torch.Tensor
    seed: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Expansion:
    """The next frontier, with the source row ``parent`` int32 [N'] and the ``code`` int32 [N'] of each row."""

    frontier: Frontier
    parent: torch.Tensor
    code: torch.Tensor


class Expand(Protocol):
    """What :func:`expand` and its device form have in common."""

    def __call__(
        self,
        logits: torch.Tensor,
        level: Level,
        frontier: Frontier,
        spans: Spans,
        filters: FilterSet | None = None,
        sampling: Sampling | None = None,
    ) -> Expansion: ...


def select_expand(ops: Ops) -> Expand:
    """:func:`expand` as ``ops`` runs it: by its kernel where one was chosen, for searches that do not sample.

    The kernel reads the spans on the device alone, so that a graph can hold it; the host lists are for the
    plain form.
    """
    if ops.choices["trie_expand"].implementation == TORCH:
        return expand

    def expand_on_device(
        logits: torch.Tensor,
        level: Level,
        frontier: Frontier,
        spans: Spans,
        filters: FilterSet | None = None,
        sampling: Sampling | None = None,
    ) -> Expansion:
        if sampling is not None:
            return expand(logits, level, frontier, spans, filters, sampling)
        selected = ops.trie_expand(
            logits,
            Children(
                level.columns,
                level.order,
                level.child_start,
                level.child_code,
                level.table,
                level.leaf_start,
                level.max_children,
                level.normalise_legal,
            ),
            Hypotheses(frontier.node, frontier.score, frontier.valid, spans.request),
            spans.table,
            len(frontier.node) if spans.source_width is None else spans.source_width,
            spans.target_rows,
            None if filters is None else LeafLists(filters.keys, filters.stride, filters.allow, filters.exclude),
        )
        return Expansion(
            Frontier(selected.node, selected.score, selected.valid), parent=selected.parent, code=selected.code
        )

    return expand_on_device


def expand(
    logits: torch.Tensor,
    level: Level,
    frontier: Frontier,
    spans: Spans,
    filters: FilterSet | None = None,
    sampling: Sampling | None = None,
) -> Expansion:
    """Select, per request, the best continuations over all its rows (SPEC B1 to B3, B5, B7).

    ``logits`` [N, W] are those of ``level.weight``. Ties: higher score, lower parent rank, lower token id.
    """
    child = level.legal(frontier.node)
    legal = (child >= 0) & frontier.valid.unsqueeze(1)
    if filters is not None:
        legal &= _alive(level, child, spans.request, filters)
    raw = logits.float()
    picked = raw[:, level.columns].masked_fill(~legal, -torch.inf)
    normaliser = log_sum_exp(picked if level.normalise_legal else raw)
    score = frontier.score.unsqueeze(1) + (picked - normaliser.unsqueeze(1))
    ranked, phi = score, None
    if sampling is not None:
        ranked, phi = _perturb(picked, score, _node_keys(level, child), frontier, spans.request, sampling)
    return _select(level, frontier, spans, child, legal, score, ranked, phi)


def _alive(level: Level, child: torch.Tensor, request: torch.Tensor, filters: FilterSet) -> torch.Tensor:
    node = child.clamp(min=0).long()
    if level.leaf_start is None:
        first, last = node, node + 1
    else:
        first, last = level.leaf_start[node].long(), level.leaf_start[node + 1].long()
    return filters.alive(request.unsqueeze(1).expand_as(node), first, last)


def _node_keys(level: Level, child: torch.Tensor) -> torch.Tensor:
    """int64, distinct for every node of the trie: nodes are numbered within their level."""
    return child.long() + (level.index << 32)


def _perturb(
    picked: torch.Tensor,
    score: torch.Tensor,
    node_keys: torch.Tensor,
    frontier: Frontier,
    request: torch.Tensor,
    sampling: Sampling,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stochastic beam search (Kool et al. 2019, algorithm 1) over the tempered legal distribution.

    The noise of a candidate is a function of its request's seed and its ``node_keys`` entry. Returns the
    perturbed log-probabilities that rank the candidates and their unperturbed values; a request at
    temperature 0 is ranked by its score.
    """
    assert frontier.phi is not None
    assert frontier.noisy is not None
    inverse = sampling.inv_temperature[request].unsqueeze(1)
    tempered = picked * inverse
    phi = frontier.phi.unsqueeze(1) + tempered - log_sum_exp(tempered).unsqueeze(1)
    key = mix64(sampling.seed[request].unsqueeze(1) ^ mix64(node_keys))
    drawn = (phi + gumbel(key)).masked_fill(picked == -torch.inf, -torch.inf)
    bound = frontier.noisy.unsqueeze(1)
    gap = bound - drawn + torch.log1p(-torch.exp(drawn - drawn.amax(-1, keepdim=True)))
    noisy = bound - gap.clamp(min=0) - torch.log1p(torch.exp(-gap.abs()))
    noisy = torch.where(drawn == -torch.inf, -torch.inf, noisy)
    return torch.where(inverse > 0, noisy, score), phi


def _select(
    level: Level,
    frontier: Frontier,
    spans: Spans,
    child: torch.Tensor,
    legal: torch.Tensor,
    score: torch.Tensor,
    ranked: torch.Tensor,
    phi: torch.Tensor | None,
) -> Expansion:
    device, total = child.device, spans.target_rows
    source = torch.zeros(total, dtype=torch.int64, device=device)
    valid = torch.zeros(total, dtype=torch.bool, device=device)
    size = level.size
    for (start, count), (to, width) in zip(spans.source, spans.target, strict=True):
        rows = slice(start, start + count)
        rank = torch.arange(count, device=device).unsqueeze(1) * size + level.order
        keys = order_key(ranked[rows], rank, legal[rows]).flatten()
        taken = min(width, keys.shape[0])
        best = torch.topk(keys, taken, sorted=True)
        source[to : to + taken] = best.indices + start * size
        valid[to : to + taken] = best.values > torch.iinfo(torch.int64).min
    parent = torch.div(source, size, rounding_mode="floor")

    def chosen(values: torch.Tensor) -> torch.Tensor:
        return torch.where(valid, values.flatten()[source], torch.zeros((), dtype=values.dtype, device=device))

    return Expansion(
        Frontier(
            node=chosen(child),
            score=chosen(score),
            valid=valid,
            phi=None if phi is None else chosen(phi),
            noisy=None if phi is None else chosen(ranked),
        ),
        parent=torch.where(valid, parent, 0).int(),
        code=torch.where(valid, source - parent * size, 0).int(),
    )
