"""A trie step as a value, the search that lists every candidate in Python, and random steps full of ties."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from flashrec.kernels.trie_expand import Children, Hypotheses, LeafLists, Selected, trie_expand
from flashrec.kernels.trie_expand_triton import ExpandPlan, expand_planned, plan_expand
from flashrec_harness.kernel_cases.base import Draws, Lane
from flashrec_harness.kernel_cases.trie import random_children, random_lists, random_spans
from flashrec_harness.kernels_suite import lanes

LANE = lanes()[-1]
Chosen = tuple[int, int, int, bytes]
"""A selected row: parent, code, node, and the bytes of its float32 score."""


@dataclass(frozen=True)
class Step:
    """The arguments of one trie step."""

    logits: torch.Tensor
    children: Children
    rows: Hypotheses
    spans: torch.Tensor
    source_width: int
    target_rows: int
    lists: LeafLists | None

    def plan(self) -> ExpandPlan:
        return plan_expand(self.slots, self.source_width)

    @property
    def slots(self) -> int:
        return self.children.max_children if self.children.table is None else len(self.children.columns)

    def run(self, plan: ExpandPlan | None = None) -> tuple[Selected, torch.Tensor]:
        """The kernel's selection, and the normaliser of each row."""
        rest = (self.logits, self.children, self.rows, self.spans, self.target_rows, self.lists)
        return expand_planned(plan or self.plan(), *rest)

    def reference(self, normaliser: torch.Tensor | None = None) -> Selected:
        rest = (self.spans, self.source_width, self.target_rows, self.lists)
        return trie_expand(self.logits, self.children, self.rows, *rest, normaliser=normaliser)


def children_of(step: Step, node: int) -> list[tuple[int, int]]:
    """(code, child) of every child of a node."""
    children = step.children
    if children.table is not None:
        return [(code, child) for code, child in enumerate(children.table[node].tolist()) if child >= 0]
    assert children.child_start is not None
    assert children.child_code is not None
    begin, end = children.child_start[node : node + 2].tolist()
    return list(zip(children.child_code[begin:end].tolist(), range(begin, end), strict=True))


def may_return(step: Step, request: int, child: int) -> bool:
    """Whether some SID under the child is not excluded, and allowed."""
    if step.lists is None:
        return True
    starts = step.children.leaf_start
    leaves = range(child, child + 1) if starts is None else range(*starts[child : child + 2].tolist())
    base = request * step.lists.stride
    listed = {key - base for key in step.lists.keys.tolist()}
    if bool(step.lists.allow[request]):
        return any(leaf in listed for leaf in leaves)
    return not bool(step.lists.exclude[request]) or any(leaf not in listed for leaf in leaves)


def oracle(step: Step, normaliser: torch.Tensor) -> list[Chosen | None]:
    """Every candidate of every request listed, scored with the given normalisers, and sorted."""
    out: list[Chosen | None] = [None] * step.target_rows
    logits = step.logits.float().cpu().numpy()
    norms, scores = normaliser.cpu().numpy(), step.rows.score.cpu().numpy()
    columns, order = step.children.columns.tolist(), step.children.order.tolist()
    for request, (begin, count, to, width) in enumerate(step.spans.T.tolist()):
        found = []
        for row in range(begin, begin + count):
            if not bool(step.rows.valid[row]):
                continue
            for code, child in children_of(step, int(step.rows.node[row])):
                if may_return(step, request, child):
                    score = np.float32(scores[row] + np.float32(logits[row, columns[code]] - norms[row]))
                    found.append((-float(score), row, order[code], code, child, score.tobytes()))
        found.sort(key=lambda candidate: candidate[:3])
        for place, (_, row, _, code, child, score) in enumerate(found[:width]):
            out[to + place] = (row, code, child, score)
    return out


def chosen(selected: Selected) -> list[Chosen | None]:
    """A selection in the oracle's form; a row that is not valid must be zero everywhere."""
    out: list[Chosen | None] = []
    for node, score, valid, parent, code in zip(*(part.cpu() for part in selected), strict=True):
        if not valid:
            assert (int(node), float(score), int(parent), int(code)) == (0, 0.0, 0, 0)
        out.append((int(parent), int(code), int(node), score.numpy().tobytes()) if valid else None)
    return out


@st.composite
def steps(draw: st.DrawFn, lane: Lane = LANE) -> Step:
    """Few distinct logits and scores, so that most candidates tie with another; some rows inert."""
    data = Draws(lane, torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1))))
    counts = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
    widths = [draw(st.integers(1, 9)) if count else 0 for count in counts]
    size, nodes = draw(lane.pick([1, 3, 14, 33], [33])), draw(st.integers(1, 5))
    children = random_children(
        data,
        size=size,
        nodes=nodes,
        dense=draw(st.booleans()),
        leaves=draw(st.booleans()),
        legal_only=draw(st.booleans()),
    )
    if children.child_code is not None and not lane.compiled and draw(st.booleans()):
        children = children._replace(child_code=children.child_code.int())
    spans = random_spans(counts, widths, lane.device)
    total = sum(counts) + len(counts) + 2
    request = torch.zeros(total, dtype=torch.int64)
    for index, (begin, count) in enumerate(spans[:2].T.tolist()):
        request[begin : begin + count] = index
    rows = Hypotheses(
        node=data.integers(total, high=nodes).int(),
        score=-data.integers(total, high=3).float(),
        valid=data.integers(total, high=6) > 0,
        request=request.to(lane.device),
    )
    kinds = [draw(st.sampled_from(["allow", "exclude", "none"])) for _ in counts]
    lists = random_lists(data, children, [*kinds, "none"]) if draw(st.booleans()) else None
    logits = data.integers(total, size + 7, high=draw(st.sampled_from([1, 3, 40]))).to(lane.dtype)
    return Step(logits, children, rows, spans, max(1, *counts), sum(widths) + len(widths) + 1, lists)
