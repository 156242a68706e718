"""One step of a catalog search: each request's best legal continuations over all its rows (SPEC B1 to B3, B7).

The reference is written for reading: it builds every row's children by code, scores them, and takes each
request's best from one stable sort. Its shapes depend on the data, so it cannot be captured.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashrec.kernels.quantize import wide


class Children(NamedTuple):
    """A trie level: the tokens that may follow each of its nodes.

    ``columns`` int32 [size]: the logits column of each code. ``order`` int32 [size]: the rank of its token id
    among the level's, a permutation. Either ``child_start`` int32 [nodes + 1] and ``child_code`` int16 or
    int32 [edges], increasing within a node (an edge's number is its child's), or ``table`` int32
    [nodes, size] with -1 where there is no child. ``leaf_start`` int32 [children + 1] are the SIDs under each
    child; ``None`` if a child is a SID. ``max_children`` is the most that a node has. ``normalise_legal``:
    the softmax runs over a row's legal children, not over all logits.
    """

    columns: torch.Tensor
    order: torch.Tensor
    child_start: torch.Tensor | None
    child_code: torch.Tensor | None
    table: torch.Tensor | None
    leaf_start: torch.Tensor | None
    max_children: int
    normalise_legal: bool


class Hypotheses(NamedTuple):
    """N rows: trie ``node`` int32, summed log-probability ``score`` float32, ``valid`` bool, ``request`` int64."""

    node: torch.Tensor
    score: torch.Tensor
    valid: torch.Tensor
    request: torch.Tensor


class LeafLists(NamedTuple):
    """SIDs that requests exclude or are restricted to: ``keys`` int64 [F], ``request * stride + SID``, sorted;
    ``allow`` and ``exclude`` bool [R] say which requests have which kind."""

    keys: torch.Tensor
    stride: int
    allow: torch.Tensor
    exclude: torch.Tensor


class Selected(NamedTuple):
    """T rows after the step, with the row (int32) and the code (int32) that each came from; zero if not valid."""

    node: torch.Tensor
    score: torch.Tensor
    valid: torch.Tensor
    parent: torch.Tensor
    code: torch.Tensor


def trie_expand(
    logits: torch.Tensor,
    children: Children,
    rows: Hypotheses,
    spans: torch.Tensor,
    source_width: int,
    target_rows: int,
    lists: LeafLists | None = None,
    normaliser: torch.Tensor | None = None,
) -> Selected:
    """The best legal continuations of each request's rows of ``logits`` [N, W], best first.

    ``spans`` int32 [4, R]: where a request's rows start and how many they are, before and after the step; a
    count of 0 is inert, and a request has at most ``source_width`` rows before it. Ties: higher score
    (-0.0 equals 0.0), lower parent row, lower token id. ``normaliser`` [N] stands in for each row's
    log-sum-exp, so that a selection can be compared whose scores are given.
    """
    child = children_by_code(children, rows.node)
    legal = (child >= 0) & rows.valid.unsqueeze(1)
    if lists is not None:
        legal &= _alive(children, child, rows.request, lists)
    exact = wide(logits)
    picked = exact[:, children.columns.long()].masked_fill(~legal, -torch.inf)
    if normaliser is None:
        normaliser = torch.logsumexp(picked if children.normalise_legal else exact, dim=-1)
    score = rows.score.unsqueeze(1) + (picked - normaliser.unsqueeze(1))
    return _select(children, child, legal, score, spans, target_rows)


def children_by_code(children: Children, node: torch.Tensor) -> torch.Tensor:
    """Child nodes of ``node`` [N]: int32 [N, size], -1 where the trie has none."""
    if children.table is not None:
        return children.table[node.long()]
    assert children.child_start is not None
    assert children.child_code is not None
    out = torch.full((len(node), len(children.columns)), -1, dtype=torch.int32, device=node.device)
    for row, at in enumerate(node.tolist()):
        begin, end = children.child_start[at : at + 2].tolist()
        edges = torch.arange(begin, end, dtype=torch.int32, device=node.device)
        out[row, children.child_code[begin:end].long()] = edges
    return out


def _alive(children: Children, child: torch.Tensor, request: torch.Tensor, lists: LeafLists) -> torch.Tensor:
    """Whether the request may return a SID under each child."""
    node = child.clamp(min=0).long()
    first, last = node, node + 1
    if children.leaf_start is not None:
        first, last = children.leaf_start[node].long(), children.leaf_start[node + 1].long()
    base = (request * lists.stride).unsqueeze(1)
    listed = torch.searchsorted(lists.keys, base + last) - torch.searchsorted(lists.keys, base + first)
    allowed = ~lists.allow[request].unsqueeze(1) | (listed > 0)
    return allowed & (~lists.exclude[request].unsqueeze(1) | (listed < last - first))


def _select(
    children: Children,
    child: torch.Tensor,
    legal: torch.Tensor,
    score: torch.Tensor,
    spans: torch.Tensor,
    target_rows: int,
) -> Selected:
    by_token = torch.argsort(children.order)
    size = len(by_token)
    out = Selected(
        node=torch.zeros(target_rows, dtype=torch.int32, device=child.device),
        score=torch.zeros(target_rows, dtype=score.dtype, device=child.device),
        valid=torch.zeros(target_rows, dtype=torch.bool, device=child.device),
        parent=torch.zeros(target_rows, dtype=torch.int32, device=child.device),
        code=torch.zeros(target_rows, dtype=torch.int32, device=child.device),
    )
    for begin, count, to, width in spans.T.tolist():
        held = slice(begin, begin + count)
        # In rank order, so that a stable sort leaves equal scores as the order of ties wants them.
        place = legal[held][:, by_token].flatten().nonzero().flatten()
        best = torch.sort(score[held][:, by_token].flatten()[place], descending=True, stable=True).indices[:width]
        parent = torch.div(place[best], size, rounding_mode="floor") + begin
        code = by_token[place[best] % size]
        taken = slice(to, to + len(best))
        out.node[taken] = child[parent, code]
        out.score[taken] = score[parent, code]
        out.valid[taken] = True
        out.parent[taken] = parent.int()
        out.code[taken] = code.int()
    return out
