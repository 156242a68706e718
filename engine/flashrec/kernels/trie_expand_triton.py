"""The trie step on a device: five launches whose grids follow from capacities, so that a graph can hold them.

Why this shape. A step has up to ``n`` rows of up to a few thousand candidates and keeps ``n`` of them, so a
sort of all candidates would move each many times. Here every candidate is written once, as four bytes of
score, and read again only where the best key of its group of slots reaches a bound; what is left to order is
little more than ``n``. Group bests are distinct 64-bit keys (score, parent row, token order), so the bound is
exact under any number of ties. Only integers are added atomically, and only to place entries of a list whose
order does not matter.

H200, 2026-11-29, random SIDs over 3 x 8,192, space ``sid`` (24,576 bf16 logits a row), one request, in a graph:
the three levels of a 1.5 million catalog take 22, 22 and 19 us at n = 50 and 25, 34 and 26 us at n = 512; of a
20 million one 22, 23 and 20 us, and 25, 40 and 27 us. Plain PyTorch takes 246, 361 and 337 us at n = 50.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashrec.kernels._triton import ceil_div, next_power_of_2
from flashrec.kernels.trie_expand import Children, Hypotheses, LeafLists, Selected
from flashrec.kernels.trie_score_triton import normalise_kernel, score_kernel
from flashrec.kernels.trie_select_triton import collect_kernel, place_kernel, threshold_kernel

NORMALISE_BLOCK = 4096
NORMALISE_WARPS = 16
"""Both decide the order in which a row's exponentials are added, so neither may depend on a batch. H200,
2026-11-29, 24,576 logits a row: 4.6 us for 50 rows and 75 us for 4,096; with 8 warps 6.6 and 82 us."""
SLOT_BLOCK = 512
PEAKS = 4096
"""Lanes of a threshold program; twice as many take 8 us instead of 4 at n = 50."""
MAX_GROUP = 64
PLACE_BLOCK = 16
PLACE_RIVALS = 256
PLACE_PROGRAMS = 64


@dataclass(frozen=True, slots=True)
class ExpandPlan:
    """Sizes of a step, from capacities alone; no choice of them changes a result.

    A row's ``slots`` in blocks of ``block`` and in groups of ``group``; ``peaks``, the lanes that a request's
    group bests are folded onto; ``per_target``, the most candidates that can reach the bound for each row
    that is kept.
    """

    slots: int
    block: int
    group: int
    peaks: int
    per_target: int

    @property
    def groups(self) -> int:
        """Groups of one row."""
        return ceil_div(self.slots, self.group)

    def list_room(self, source_rows: int, target_rows: int) -> tuple[int, int]:
        """Entries to allot for each source and each target row: a list holds no more than ``per_target`` for
        each row that is kept, nor than all slots of its source rows; whichever takes less memory."""
        if source_rows * self.slots < target_rows * self.per_target:
            return self.slots, 0
        return 0, self.per_target

    @classmethod
    def of(cls, slots: int, group: int, peaks: int, source_width: int) -> ExpandPlan:
        """The plan with these sizes, powers of two, for at most ``source_width`` rows to a request."""
        block = min(SLOT_BLOCK, max(16, group, next_power_of_2(slots)))
        folds = ceil_div(source_width * ceil_div(slots, group), peaks)
        # The threshold may let through up to twice as many groups as are kept.
        return cls(slots, block, group, peaks, 2 * group * folds)


def plan_expand(slots: int, source_width: int) -> ExpandPlan:
    """For rows of ``slots`` slots, at most ``source_width`` of them to a request: groups as small as the
    threshold's program can take, but about 64 to a row at most."""
    wanted = next_power_of_2(ceil_div(source_width * slots, PEAKS))
    group = min(wanted, max(1, next_power_of_2(slots) // 64), MAX_GROUP)
    peaks = min(PEAKS, max(32, next_power_of_2(source_width * ceil_div(slots, group))))
    return ExpandPlan.of(slots, group, peaks, source_width)


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
    slots = children.max_children if children.table is None else len(children.columns)
    plan = plan_expand(slots, source_width)
    return expand_planned(plan, logits, children, rows, spans, target_rows, lists)[0]


def expand_planned(
    plan: ExpandPlan,
    logits: torch.Tensor,
    children: Children,
    rows: Hypotheses,
    spans: torch.Tensor,
    target_rows: int,
    lists: LeafLists | None,
) -> tuple[Selected, torch.Tensor]:
    """What was selected, and each valid row's log-sum-exp float32 [N] (other rows are not written)."""
    device, count = logits.device, logits.shape[0]
    requests = spans.shape[1]

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    bits, peaks = empty(count, plan.slots), empty(count, plan.groups, dtype=torch.int64)
    normaliser = empty(count, dtype=torch.float32)
    _score_rows(plan, logits, children, rows, spans, lists, normaliser, bits, peaks)
    per_source, per_target = plan.list_room(count, target_rows)
    entries = count * per_source + target_rows * per_target
    threshold, found = empty(requests, dtype=torch.int64), empty(requests)
    keys, places = empty(entries, dtype=torch.int64), empty(entries)
    selected = Selected(
        node=empty(target_rows),
        score=empty(target_rows, dtype=torch.float32),
        valid=empty(target_rows, dtype=torch.bool),
        parent=empty(target_rows),
        code=empty(target_rows),
    )
    out = selected._replace(valid=selected.valid.view(torch.int8))
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
    links, size, dense = _links(children, bits), len(children.columns), children.table is not None
    collect_kernel[(count, ceil_div(plan.slots, plan.block))](
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
        per_source,
        per_target,
        DENSE=dense,
        BLOCK=plan.block,
        GROUP=plan.group,
        num_warps=4,
    )
    place_kernel[(requests, min(PLACE_PROGRAMS, ceil_div(2 * target_rows, PLACE_BLOCK)))](
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
        per_source,
        per_target,
        DENSE=dense,
        BLOCK=PLACE_BLOCK,
        BLOCK_RIVALS=PLACE_RIVALS,
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


def _score_rows(
    plan: ExpandPlan,
    logits: torch.Tensor,
    children: Children,
    rows: Hypotheses,
    spans: torch.Tensor,
    lists: LeafLists | None,
    normaliser: torch.Tensor,
    bits: torch.Tensor,
    peaks: torch.Tensor,
) -> None:
    """Fills ``normaliser``, ``bits`` and ``peaks``: normalise, then score; over legal children only, their
    logits are gathered first."""
    valid, listed = rows.valid.view(torch.int8), 0 if lists is None else lists.keys.shape[0]

    def normalise(values: torch.Tensor) -> None:
        size = values.shape[1]
        normalise_kernel[(len(values),)](
            values,
            valid,
            rows.request,
            spans,
            normaliser,
            values.stride(0),
            size,
            spans.shape[1],
            SLOTS=values is bits,
            BLOCK=min(NORMALISE_BLOCK, max(16, next_power_of_2(size))),
            num_warps=NORMALISE_WARPS,
        )

    def score(gather: bool, finish: bool) -> None:
        filtered = gather and lists is not None
        score_kernel[(len(logits), ceil_div(plan.slots, plan.block))](
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
            len(children.columns),
            plan.slots,
            plan.groups,
            spans.shape[1],
            0 if lists is None else lists.stride,
            listed,
            listed.bit_length(),
            GATHER=gather,
            FINISH=finish,
            DENSE=children.table is not None,
            HAS_LEAVES=filtered and children.leaf_start is not None,
            HAS_LISTS=filtered,
            BLOCK=plan.block,
            GROUP=plan.group,
            num_warps=4,
        )

    if children.normalise_legal:
        score(gather=True, finish=False)
        normalise(bits)
    else:
        normalise(logits)
    score(gather=not children.normalise_legal, finish=True)
