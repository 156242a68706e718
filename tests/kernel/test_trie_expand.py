"""The trie step against a search that lists every candidate in Python, and its planted faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trie_oracle import LANE, Step, children_of, chosen, may_return, oracle, steps

from flashrec.kernels.ops import TORCH, Choice, select_ops
from flashrec.kernels.registry import TRITON
from flashrec.kernels.trie_expand import Children, Hypotheses, LeafLists, Selected
from flashrec.kernels.trie_expand_triton import ExpandPlan, plan_expand
from flashrec.search.expand import Frontier, Sampling, Spans, expand, select_expand
from flashrec.search.filters import FilterSet
from flashrec.search.levels import Level
from flashrec_harness.kernel_cases.base import Draws
from flashrec_harness.kernel_cases.trie import random_children, random_spans


def usable(step: Step, normaliser: torch.Tensor) -> torch.Tensor:
    """The normalisers of rows that have one, 0 elsewhere."""
    return torch.where(step.rows.valid, normaliser, 0.0).nan_to_num()


@given(steps(), st.sampled_from([None, (4, 16)] if LANE.compiled else [None, (1, 32), (2, 16), (4, 16), (8, 32)]))
def test_selection_is_exact_whatever_the_plan(step: Step, sizes: tuple[int, int] | None) -> None:
    plan = None if sizes is None else ExpandPlan.of(step.slots, *sizes, step.source_width)
    selected, normaliser = step.run(plan)
    assert chosen(selected) == oracle(step, normaliser)
    assert chosen(step.reference(usable(step, normaliser))) == oracle(step, normaliser)


@given(steps())
@settings(max_examples=20)
def test_normaliser_is_the_log_sum_exp(step: Step) -> None:
    _, normaliser = step.run()
    columns = step.children.columns.tolist()
    for request, (begin, count, _, _) in enumerate(step.spans.T.tolist()):
        for row in range(begin, begin + count):
            if not bool(step.rows.valid[row]):
                continue
            values = step.logits[row].double().tolist()
            if step.children.normalise_legal:
                children = children_of(step, int(step.rows.node[row]))
                values = [values[columns[code]] for code, child in children if may_return(step, request, child)]
            if values:
                assert float(normaliser[row]) == pytest.approx(float(np.logaddexp.reduce(values)), abs=4e-6)


def wide_step(*, group_ties: bool) -> Step:
    """Two requests over nodes of up to 700 children: several blocks, groups and folds of a threshold program."""
    data = Draws(LANE, torch.Generator().manual_seed(3))
    children = random_children(data, size=700, nodes=4, dense=False, leaves=False, legal_only=False)
    spans = random_spans([6, 2], [40, 300], LANE.device)
    total = 6 + 2 + 4
    request = torch.zeros(total, dtype=torch.int64)
    request[8:10] = 1
    rows = Hypotheses(
        node=data.integers(total, high=4).int(),
        score=torch.zeros(total, device=LANE.device) - (0.0 if group_ties else 0.5),
        valid=torch.ones(total, dtype=torch.bool, device=LANE.device),
        request=request.to(LANE.device),
    )
    logits = torch.zeros(total, 707, device=LANE.device) if group_ties else data.normal(total, 707, scale=3.0)
    return Step(logits.to(LANE.dtype), children, rows, spans, 6, 343, None)


@pytest.mark.parametrize("group_ties", [True, False])
@pytest.mark.parametrize("sizes", [None, (64, 16), (16, 64), (1, 4096)])
def test_many_blocks(group_ties: bool, sizes: tuple[int, int] | None) -> None:
    step = wide_step(group_ties=group_ties)
    plan = None if sizes is None else ExpandPlan.of(step.slots, *sizes, step.source_width)
    selected, normaliser = step.run(plan)
    assert chosen(selected) == oracle(step, normaliser)


def test_a_request_has_the_same_bits_alone() -> None:
    step = wide_step(group_ties=False)
    together, normaliser = step.run()
    alone = replace(
        step,
        logits=step.logits[8:10].clone(),
        rows=Hypotheses(*(part[8:10].clone() for part in step.rows))._replace(
            request=torch.zeros(2, dtype=torch.int64, device=LANE.device)
        ),
        spans=torch.tensor([[0], [2], [0], [300]], dtype=torch.int32, device=LANE.device),
        source_width=2,
        target_rows=300,
    )
    selected, own = alone.run()
    assert torch.equal(own, normaliser[8:10])
    assert torch.equal(selected.score, together.score[42:342])
    assert torch.equal(selected.node, together.node[42:342])
    assert torch.equal(selected.parent + 8 * selected.valid, together.parent[42:342])


def test_negative_zero_ties_with_zero() -> None:
    step = tie_step()
    signs = torch.tensor([0.0, -0.0, 0.0, -0.0], device=LANE.device)
    step = replace(step, rows=step.rows._replace(score=signs))
    selected, normaliser = step.run()
    assert chosen(selected) == oracle(step, normaliser)
    assert selected.parent.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_a_nan_logit_is_selected_first() -> None:
    step = tie_step()
    logits = step.logits.clone()
    logits[2, 0] = float("nan")
    selected, _ = replace(step, logits=logits).run()
    assert selected.parent[:3].tolist() == [2, 2, 2]
    assert selected.score[:3].isnan().all()
    assert selected.valid.all()


def tie_step() -> Step:
    """One request, four rows of one node with three children, all candidates equal."""
    device = LANE.device
    children = Children(
        columns=torch.tensor([0, 1, 2], dtype=torch.int32, device=device),
        order=torch.tensor([2, 1, 0], dtype=torch.int32, device=device),
        child_start=torch.tensor([0, 3], dtype=torch.int32, device=device),
        child_code=torch.tensor([0, 1, 2], dtype=torch.int16, device=device),
        table=None,
        leaf_start=None,
        max_children=3,
        normalise_legal=False,
    )
    rows = Hypotheses(
        node=torch.zeros(4, dtype=torch.int32, device=device),
        score=torch.zeros(4, device=device),
        valid=torch.ones(4, dtype=torch.bool, device=device),
        request=torch.zeros(4, dtype=torch.int64, device=device),
    )
    spans = torch.tensor([[0], [4], [0], [12]], dtype=torch.int32, device=device)
    return Step(torch.zeros(4, 3, dtype=LANE.dtype, device=device), children, rows, spans, 4, 12, None)


def excluding(step: Step) -> Step:
    """The step with its first SID excluded."""
    flag = torch.tensor([True], device=LANE.device)
    return replace(step, lists=LeafLists(torch.zeros(1, dtype=torch.int64, device=LANE.device), 4, ~flag, flag))


Fault = Callable[[Step], Selected]


def _tokens_in_code_order(step: Step) -> Selected:
    order = torch.arange(3, dtype=torch.int32, device=LANE.device)
    return replace(step, children=step.children._replace(order=order)).run()[0]


def _later_parents_first(step: Step) -> Selected:
    width = step.target_rows
    return Selected(*(part[torch.arange(width - 1, -1, -1, device=LANE.device)] for part in step.run()[0]))


def _parent_off_by_one(step: Step) -> Selected:
    selected = step.run()[0]
    return selected._replace(parent=selected.parent + selected.valid.int())


def _without_filters(step: Step) -> Selected:
    return replace(step, lists=None).run()[0]


def _one_too_few(step: Step) -> Selected:
    spans = step.spans.clone()
    spans[1] -= 1
    return replace(step, spans=spans).run()[0]


@pytest.mark.parametrize(
    "fault", [_tokens_in_code_order, _later_parents_first, _parent_off_by_one, _without_filters, _one_too_few]
)
def test_planted_faults_are_seen(fault: Fault) -> None:
    step = excluding(tie_step())
    selected, normaliser = step.run()
    expected = oracle(step, normaliser)
    assert chosen(selected) == expected
    faulty = fault(step)
    assert [row and row[:3] for row in chosen(faulty)] != [row and row[:3] for row in expected]


@pytest.mark.parametrize(
    ("slots", "source_width"), [(8192, 1), (2600, 50), (2600, 1024), (250, 512), (1, 8192), (8, 1)]
)
def test_a_plan_covers_its_capacities(slots: int, source_width: int) -> None:
    plan = plan_expand(slots, source_width)
    folds = -(-source_width * plan.groups // plan.peaks)
    assert plan.groups * plan.group >= slots
    assert plan.block % plan.group == 0
    # The bound lets through at most a quarter more groups than rows are kept, one more for the narrowest.
    assert plan.per_target >= 2 * plan.group * folds


def searched(step: Step, implementation: str, sampling: Sampling | None = None) -> Sequence[torch.Tensor]:
    """The step through the engine's ``expand``, by the kernel or in plain PyTorch."""
    ops = select_ops(torch.device("cpu"), torch.float32)
    if implementation == TRITON:
        choices = {**ops.choices, "trie_expand": Choice(TRITON, "asked for")}
        ops = replace(ops, trie_expand=lambda *rest: Step(*rest).run()[0], choices=choices)
    children = step.children
    level = Level(
        index=0,
        weight=step.logits,
        columns=children.columns,
        tokens=children.order,
        order=children.order,
        normalise_legal=children.normalise_legal,
        max_children=children.max_children,
        child_start=children.child_start,
        child_code=children.child_code,
        table=children.table,
        leaf_start=children.leaf_start,
    )
    source, target = ([tuple(span) for span in step.spans[half].T.tolist()] for half in (slice(0, 2), slice(2, 4)))
    spans = Spans(source, target, step.spans, step.rows.request, step.target_rows)
    phi = None if sampling is None else step.rows.score
    frontier = Frontier(step.rows.node, step.rows.score, step.rows.valid, phi=phi, noisy=phi)
    filters = None if step.lists is None else FilterSet(*step.lists)
    out = select_expand(ops)(step.logits, level, frontier, spans, filters, sampling)
    return out.frontier.node, out.frontier.valid, out.parent, out.code, out.frontier.score


@given(steps())
@settings(max_examples=20)
def test_the_engine_finds_the_same_with_and_without_the_kernel(step: Step) -> None:
    # One score a row and one normaliser: no rounding can tell rows apart.
    rows = step.rows._replace(score=torch.zeros_like(step.rows.score))
    flat = replace(step, rows=rows, logits=torch.zeros_like(step.logits), lists=step.lists)
    if step.children.normalise_legal:
        flat = replace(flat, children=step.children._replace(normalise_legal=False))
    *exact, score = searched(flat, TRITON)
    *expected, expected_score = searched(flat, TORCH)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(exact, expected, strict=True))
    torch.testing.assert_close(score, expected_score, rtol=0, atol=4e-6)


def test_the_choice_of_expand() -> None:
    ops = select_ops(torch.device("cpu"), torch.float32)
    assert select_expand(ops) is expand
    step = tie_step()
    requests = step.spans.shape[1]
    sampling = Sampling(torch.ones(requests, device=LANE.device), torch.arange(requests, device=LANE.device))
    sampled = searched(step, TRITON, sampling)
    assert all(torch.equal(a, b) for a, b in zip(sampled, searched(step, TORCH, sampling), strict=True))
