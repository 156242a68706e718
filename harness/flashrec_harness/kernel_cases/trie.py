"""Cases of the trie step whose selection no rounding can change: equal scores are equal bits, others far apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from flashrec.kernels.trie_expand import Children, Hypotheses, LeafLists
from flashrec.search.filters import REQUEST_STRIDE
from flashrec_harness.equivalence import Rule
from flashrec_harness.kernel_cases.base import Argument, Draws, KernelCase, Lane, Output, draws, exact

STEP = 0.25
"""Spacing of the logits, exact in bf16."""
_CPU_SIZES, _GPU_SIZES = (1, 2, 13, 65), (1024,)
_CPU_BEAMS, _GPU_BEAMS = (1, 3, 8), (1, 50, 129)


def random_children(data: Draws, *, size: int, nodes: int, dense: bool, leaves: bool, legal_only: bool) -> Children:
    """A level of ``nodes`` nodes with 1 to ``size`` children each, tokens in any order, columns anywhere."""
    device = data.lane.device
    density = torch.rand(nodes, 1, generator=data.generator)
    there = (torch.rand(nodes, size, generator=data.generator) < density).numpy()
    there[:, int(data.integers(1, high=size))] = True
    start = np.concatenate(([0], np.cumsum(there.sum(1)))).astype(np.int32)
    edges = int(start[-1])
    table = np.full((nodes, size), -1, dtype=np.int32)
    table[there] = np.arange(edges)
    leaf_start = torch.cat([torch.zeros(1), (data.integers(edges, high=3).cpu() + 1).cumsum(0)]).int()
    return Children(
        columns=data.permutation(size + 7)[:size].int(),
        order=data.permutation(size).int(),
        child_start=None if dense else torch.from_numpy(start).to(device),
        child_code=None if dense else torch.from_numpy(np.nonzero(there)[1].astype(np.int16)).to(device),
        table=torch.from_numpy(table).to(device) if dense else None,
        leaf_start=leaf_start.to(device) if leaves else None,
        max_children=int(there.sum(1).max()),
        normalise_legal=legal_only,
    )


def random_lists(data: Draws, children: Children, kinds: Sequence[str]) -> LeafLists:
    """One list for each of ``kinds`` ("allow", "exclude" or "none"), of about half of the SIDs."""
    if children.leaf_start is not None:
        leaves = int(children.leaf_start[-1])
    else:
        links = children.table if children.table is not None else children.child_start
        assert links is not None
        leaves = int(links.max()) + (children.table is not None)
    listed = [
        torch.rand(leaves, generator=data.generator).lt(0.5).nonzero().flatten() + request * REQUEST_STRIDE
        for request, kind in enumerate(kinds)
        if kind != "none"
    ]
    device = data.lane.device
    return LeafLists(
        keys=torch.cat(listed or [torch.empty(0, dtype=torch.int64)]).to(device),
        stride=REQUEST_STRIDE,
        allow=torch.tensor([kind == "allow" for kind in kinds], device=device),
        exclude=torch.tensor([kind == "exclude" for kind in kinds], device=device),
    )


def random_spans(counts: Sequence[int], widths: Sequence[int], device: torch.device) -> torch.Tensor:
    """int32 [4, R + 1]: each request's rows before and after, one row between requests, one inert request."""
    spans = torch.zeros(4, len(counts) + 1, dtype=torch.int32)
    source = target = 1
    for request, (count, width) in enumerate(zip(counts, widths, strict=True)):
        spans[:, request] = torch.tensor([source, count, target, width])
        source, target = source + count + 1, target + width + 1
    return spans.to(device)


def _separated(children: Children, logits: torch.Tensor, copies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes row ``i`` a copy of row ``copies[i]``; returns (logits, scores) such that the candidates of
    different originals differ by a fraction of :data:`STEP` that no rounding reaches. Scores are large
    beside the logits, so that the rounding of what is in between is small beside theirs."""
    logits = logits[copies]
    rows = len(copies)
    level = torch.arange(rows, device=logits.device)[copies]
    target = -16.0 - (level % 5) * STEP - STEP * (level + 1) / (rows + 1)
    total = torch.logsumexp(logits.double(), dim=-1)
    return logits, (target + total).float() if not children.normalise_legal else target.float()


def _selected(result: Any, _: Sequence[Any]) -> list[Output]:
    kept = [Output(name, getattr(result, name), Rule.BITWISE) for name in ("node", "valid", "parent", "code")]
    return [*kept, Output("score", result.score)]


@st.composite
def trie_expand_cases(draw: st.DrawFn, lane: Lane) -> KernelCase:
    """:func:`flashrec.kernels.trie_expand.trie_expand`: dense and CSR, filters, ties, inert rows and requests."""
    data = draw(draws(lane))
    size = draw(lane.pick(_CPU_SIZES, _GPU_SIZES))
    beams = st.lists(lane.pick(_CPU_BEAMS, _GPU_BEAMS), min_size=1, max_size=3)
    widths = draw(beams)
    first, listed, legal_only = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    dense = first if lane.compiled else draw(st.booleans())
    counts = [1 if first else width for width in widths]
    nodes = 1 if first else draw(st.integers(1, 6))
    children = random_children(
        data, size=size, nodes=nodes, dense=dense, leaves=draw(st.booleans()), legal_only=legal_only
    )
    spans = random_spans(counts, widths, lane.device)
    total = sum(counts) + len(counts) + 2
    node = data.integers(total, high=nodes).int()
    copies = torch.arange(total, device=lane.device)
    if legal_only:
        # A row's normaliser depends on its node and its filters: all rows of one node, one score.
        node.zero_()
        copies.zero_()
    else:
        copies = torch.where(data.integers(total, high=2) > 0, data.integers(total, high=total), copies)
        copies = copies[copies]
        node = node[copies]
    grid = (data.integers(total, size + 7, high=9) * STEP - 1.0).to(lane.dtype)
    logits, score = _separated(children, grid, copies)
    request = torch.zeros(total, dtype=torch.int64, device=lane.device)
    for index, (begin, count) in enumerate(spans[:2, :-1].T.tolist()):
        request[begin : begin + count] = index
    rows = Hypotheses(node, score, data.integers(total, high=8) > 0, request)
    kinds = [draw(st.sampled_from(["allow", "exclude", "none"])) for _ in widths]
    lists = random_lists(data, children, [*kinds, "none"]) if listed else None
    capacity = 1 if first else max(counts)
    tail = (capacity, sum(widths) + len(widths) + 1, lists)
    return KernelCase(
        f"{size} codes, {nodes} nodes, dense {dense}, widths {widths}, first {first}, filters "
        f"{kinds if listed else None}, legal only {legal_only}",
        (Argument(logits, pad=0 if not lane.compiled else 8), children, rows, Argument(spans), *tail),
        (exact(logits), children, rows._replace(score=exact(score)), spans, *tail),
        _selected,
        {},
    )
