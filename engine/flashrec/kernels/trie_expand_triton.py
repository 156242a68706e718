"""The trie step on a device: four launches whose grids follow from capacities, so that a graph can hold them.

Why this shape. A step has up to ``n`` rows of up to a few thousand candidates and keeps ``n`` of them, so a
sort of all candidates would move each many times. Here every candidate is written once, as four bytes of
score, and read again only where the best key of its group of slots reaches a bound; what is left to order is
little more than ``n``. Group bests are distinct 64-bit keys (score, parent row, token order), so the bound is
exact under any number of ties. Only integers are added atomically, and only to place entries of a list whose
order does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashrec.kernels._triton import ceil_div, next_power_of_2
from flashrec.kernels.trie_expand import Children, Hypotheses, LeafLists, Selected
from flashrec.kernels.trie_score_triton import score_kernel
from flashrec.kernels.trie_select_triton import collect_kernel, place_kernel, threshold_kernel

LOGITS_BLOCK = 8192
SCORE_WARPS = 8
"""Both decide the order in which a row's exponentials are added, so neither may depend on a batch."""
SCORE_SLOTS = 4096
COLLECT_SLOTS = 1024
PEAKS = 8192
MAX_GROUP = 64
PLACE_ENTRIES = 32
PLACE_RIVALS = 256
PLACE_PROGRAMS = 64


@dataclass(frozen=True, slots=True)
class ExpandPlan:
    """Sizes of a launch, from capacities alone; no choice of them changes a result.

    ``slots`` of a row, ``group`` slots to a group, ``groups`` to a row; ``peaks`` lanes of a threshold
    program; ``per_target``, the most candidates that can reach the bound for each row that is kept.
    """

    slots: int
    group: int
    groups: int
    peaks: int
    per_target: int


def plan_expand(slots: int, source_width: int) -> ExpandPlan:
    """For rows of ``slots`` slots, at most ``source_width`` of them to a request."""
    padded = next_power_of_2(slots)
    wanted = next_power_of_2(ceil_div(source_width * slots, PEAKS))
    group = min(wanted, max(1, padded // 64), MAX_GROUP)
    groups = ceil_div(slots, group)
    peaks = min(PEAKS, max(32, next_power_of_2(source_width * groups)))
    return ExpandPlan(slots, group, groups, peaks, group * ceil_div(source_width * groups, peaks))


def trie_expand_triton(
    logits: torch.Tensor,
    children: Children,
    rows: Hypotheses,
    spans: torch.Tensor,
    source_width: int,
    target_rows: int,
    lists: LeafLists | None = None,
) -> Selected:
    """:func:`flashrec.kernels.trie_expand.trie_expand` without its ``normaliser``; the last axis of ``logits``
    must be contiguous."""
    return expand_with_normaliser(logits, children, rows, spans, source_width, target_rows, lists)[0]


def expand_with_normaliser(
    logits: torch.Tensor,
    children: Children,
    rows: Hypotheses,
    spans: torch.Tensor,
    source_width: int,
    target_rows: int,
    lists: LeafLists | None = None,
) -> tuple[Selected, torch.Tensor]:
    """What was selected, and each valid row's log-sum-exp float32 [N] (other rows are not written)."""
    device, count = logits.device, logits.shape[0]
    size, requests = len(children.columns), spans.shape[1]
    plan = plan_expand(size if children.table is not None else children.max_children, source_width)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    normaliser = empty(count, dtype=torch.float32)
    bits = empty(count, plan.slots)
    peaks = empty(count, plan.groups, dtype=torch.int64)
    threshold, found = empty(requests, dtype=torch.int64), empty(requests)
    entries = target_rows * plan.per_target
    keys, places = empty(entries, dtype=torch.int64), empty(entries)
    selected = Selected(
        node=empty(target_rows),
        score=empty(target_rows, dtype=torch.float32),
        valid=empty(target_rows, dtype=torch.bool),
        parent=empty(target_rows),
        code=empty(target_rows),
    )
    out = selected._replace(valid=selected.valid.view(torch.int8))
    _score(logits, children, rows, spans, lists, plan, normaliser, bits, peaks)
    threshold_kernel[(requests,)](
        peaks,
        spans,
        threshold,
        found,
        *out,
        requests,
        plan.groups,
        target_rows,
        BLOCK=plan.peaks,
        BLOCK_ROWS=256,
        num_warps=max(4, plan.peaks // 512),
    )
    links = _links(children, bits)
    dense = children.table is not None
    block = min(COLLECT_SLOTS, max(16, next_power_of_2(plan.slots)))
    collect_kernel[(count, ceil_div(plan.slots, block))](
        bits,
        peaks,
        threshold,
        found,
        keys,
        places,
        rows.node,
        rows.request,
        spans,
        children.order,
        *links,
        size,
        plan.slots,
        plan.groups,
        requests,
        plan.per_target,
        DENSE=dense,
        BLOCK_SLOTS=block,
        GROUP=plan.group,
        num_warps=4,
    )
    programs = min(PLACE_PROGRAMS, ceil_div(2 * target_rows, PLACE_ENTRIES))
    place_kernel[(requests, programs)](
        bits,
        found,
        keys,
        places,
        rows.node,
        spans,
        *links,
        *out,
        size,
        plan.slots,
        requests,
        plan.per_target,
        DENSE=dense,
        BLOCK=PLACE_ENTRIES,
        BLOCK_OTHERS=PLACE_RIVALS,
        num_warps=4,
    )
    return selected, normaliser


def _links(children: Children, absent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``child_start``, ``child_code`` and ``table``, with ``absent`` for those that the level has not."""
    if children.table is not None:
        return absent, absent, children.table
    assert children.child_start is not None
    assert children.child_code is not None
    return children.child_start, children.child_code, absent


def _score(
    logits: torch.Tensor,
    children: Children,
    rows: Hypotheses,
    spans: torch.Tensor,
    lists: LeafLists | None,
    plan: ExpandPlan,
    normaliser: torch.Tensor,
    bits: torch.Tensor,
    peaks: torch.Tensor,
) -> None:
    count, width = logits.shape
    valid = rows.valid.view(torch.int8)
    listed = 0 if lists is None else lists.keys.shape[0]
    score_kernel[(count,)](
        logits,
        children.columns,
        children.order,
        *_links(children, bits),
        bits if children.leaf_start is None else children.leaf_start,
        rows.node,
        rows.score,
        valid,
        rows.request,
        spans,
        peaks if lists is None else lists.keys,
        valid if lists is None else lists.allow.view(torch.int8),
        valid if lists is None else lists.exclude.view(torch.int8),
        normaliser,
        bits,
        peaks,
        logits.stride(0),
        width,
        len(children.columns),
        plan.slots,
        plan.groups,
        spans.shape[1],
        0 if lists is None else lists.stride,
        listed,
        listed.bit_length(),
        DENSE=children.table is not None,
        HAS_LEAVES=children.leaf_start is not None,
        HAS_LISTS=lists is not None,
        NORMALISE_LEGAL=children.normalise_legal,
        BLOCK_WIDTH=min(LOGITS_BLOCK, max(16, next_power_of_2(width))),
        BLOCK_SLOTS=min(SCORE_SLOTS, max(16, next_power_of_2(plan.slots))),
        GROUP=plan.group,
        num_warps=SCORE_WARPS,
    )
