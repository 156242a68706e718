"""Device half two of the trie step: each request's best candidates, exactly, in three launches.

The best of every group of slots is known, so a key that ``width`` of those reach is a lower bound for the
``width``-th best candidate, and no group whose best is below it holds one. One program a request finds such a
bound by bisection (:func:`threshold_kernel`); every row then hands over its candidates that reach it
(:func:`collect_kernel`); and each of those finds its place by counting the keys above its own
(:func:`place_kernel`). Keys are distinct, so neither the order in which candidates were handed over nor the
size of the groups can change the result.
"""

from __future__ import annotations

from flashrec.kernels._triton import jit, tl
from flashrec.kernels.trie_score_triton import NO_KEY, NO_SCORE, order_key, read_slots, row_span


@jit
def _clear_rows(
    program: tl.tensor,
    programs: tl.tensor,
    target_rows: tl.tensor,
    out_node: tl.tensor,
    out_score: tl.tensor,
    out_valid: tl.tensor,
    out_parent: tl.tensor,
    out_code: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Device: one program's share of the target rows becomes invalid and zero."""
    zero = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(program * BLOCK, target_rows, programs * BLOCK):
        row = first + tl.arange(0, BLOCK)
        inside = row < target_rows
        tl.store(out_node + row, zero, mask=inside)
        tl.store(out_score + row, zero.to(tl.float32), mask=inside)
        tl.store(out_valid + row, zero.to(tl.int8), mask=inside)
        tl.store(out_parent + row, zero, mask=inside)
        tl.store(out_code + row, zero, mask=inside)


@jit
def threshold_kernel(
    peaks: tl.tensor,
    spans: tl.tensor,
    threshold: tl.tensor,
    found: tl.tensor,
    out_node: tl.tensor,
    out_score: tl.tensor,
    out_valid: tl.tensor,
    out_parent: tl.tensor,
    out_code: tl.tensor,
    requests: tl.tensor,
    groups: tl.tensor,
    target_rows: tl.tensor,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
) -> None:
    """One request a program: ``threshold`` int64 [R], which at least ``width`` of its ``peaks`` [N, groups]
    reach, where there are as many, and at most a quarter more.

    More than ``BLOCK`` peaks are first folded onto ``BLOCK`` lanes, which makes the groups larger. Also
    clears ``found`` int32 [R] and the target rows.
    """
    program = tl.program_id(0)
    _clear_rows(program, requests, target_rows, out_node, out_score, out_valid, out_parent, out_code, BLOCK_ROWS)
    tl.store(found + program, 0)
    begin = tl.load(spans + program).to(tl.int64)
    total = tl.load(spans + requests + program) * groups
    width = tl.load(spans + 3 * requests + program)
    own = peaks + begin * groups
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), NO_KEY, tl.int64)
    for first in range(0, total, BLOCK):
        best = tl.maximum(best, tl.load(own + first + lane, mask=first + lane < total, other=NO_KEY))
    live = best != NO_KEY
    low = tl.min(tl.where(live, best, 0x7FFFFFFFFFFFFFFF), axis=0)
    high = tl.max(best, axis=0)
    reached = tl.sum(live.to(tl.int32), axis=0)
    few = reached < width
    low = tl.where(few, NO_KEY + 1, low)
    reached = tl.where(few, 0, reached)
    # Equal scores, which bf16 logits make common, would send an exact bisection through the bits of the rank:
    # 26 us instead of 4 at a first level of 8,192 candidates (H200, 2026-11-29). A quarter more stops it before.
    most = width + (width + 3) // 4
    while (low < high) & (reached > most):
        # The average, rounded up, without an overflow.
        middle = (low | high) - ((low ^ high) >> 1)
        above = tl.sum((best >= middle).to(tl.int32), axis=0)
        enough = above >= width
        high = tl.where(enough, high, middle - 1)
        reached = tl.where(enough, above, reached)
        low = tl.where(enough, middle, low)
    tl.store(threshold + program, low)


@jit
def collect_kernel(
    bits: tl.tensor,
    peaks: tl.tensor,
    threshold: tl.tensor,
    found: tl.tensor,
    keys: tl.tensor,
    places: tl.tensor,
    node: tl.tensor,
    request: tl.tensor,
    spans: tl.tensor,
    order: tl.tensor,
    child_start: tl.tensor,
    child_code: tl.tensor,
    table: tl.tensor,
    size: tl.tensor,
    slots: tl.tensor,
    groups: tl.tensor,
    requests: tl.tensor,
    per_source: tl.tensor,
    per_target: tl.tensor,
    DENSE: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """One block of slots of one row a program: appends what reaches the threshold to its request's list.

    The lists are ``keys`` int64 and ``places`` int32 (slot in its row), and ``found`` int32 [R] counts them; a
    request's begins at ``per_source`` times its first source row plus ``per_target`` times its first target row.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    group = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    best = tl.max(tl.load(peaks + row * groups + group, mask=group < groups, other=NO_KEY), axis=0)
    owner, begin, inside = row_span(row, request, spans, requests)
    if inside & (tl.load(spans + 3 * requests + owner) > 0):
        cut = tl.load(threshold + owner)
        if best >= cut:
            slot = block * BLOCK + tl.arange(0, BLOCK)
            held = tl.load(bits + row * slots + slot, mask=slot < slots, other=NO_SCORE)
            live = held != NO_SCORE
            at = tl.load(node + row)
            _, code = read_slots(slot, at, child_start, child_code, table, size, live, DENSE)
            rank = (row - begin) * size + tl.load(order + code, mask=live, other=0)
            key = order_key(held, rank)
            keep = live & (key >= cut)
            kept = keep.to(tl.int32)
            ahead = tl.atomic_add(found + owner, tl.sum(kept, axis=0))
            to = tl.load(spans + 2 * requests + owner).to(tl.int64)
            list_start = begin.to(tl.int64) * per_source + to * per_target
            entry = list_start + ahead + tl.cumsum(kept, axis=0) - 1
            tl.store(keys + entry, key, mask=keep)
            tl.store(places + entry, slot, mask=keep)


@jit
def place_kernel(
    bits: tl.tensor,
    found: tl.tensor,
    keys: tl.tensor,
    places: tl.tensor,
    node: tl.tensor,
    spans: tl.tensor,
    child_start: tl.tensor,
    child_code: tl.tensor,
    table: tl.tensor,
    out_node: tl.tensor,
    out_score: tl.tensor,
    out_valid: tl.tensor,
    out_parent: tl.tensor,
    out_code: tl.tensor,
    size: tl.tensor,
    slots: tl.tensor,
    requests: tl.tensor,
    per_source: tl.tensor,
    per_target: tl.tensor,
    DENSE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_RIVALS: tl.constexpr,
) -> None:
    """Some of a request's list a program: each entry counts the keys above its own, which is its target row."""
    owner = tl.program_id(0)
    begin = tl.load(spans + owner)
    to = tl.load(spans + 2 * requests + owner)
    width = tl.load(spans + 3 * requests + owner)
    total = tl.load(found + owner)
    list_start = begin.to(tl.int64) * per_source + to.to(tl.int64) * per_target
    for first in range(tl.program_id(1) * BLOCK, total, tl.num_programs(1) * BLOCK):
        entry = first + tl.arange(0, BLOCK)
        inside = entry < total
        key = tl.load(keys + list_start + entry, mask=inside, other=NO_KEY)
        place = tl.zeros((BLOCK,), dtype=tl.int32)
        for start in range(0, total, BLOCK_RIVALS):
            other = start + tl.arange(0, BLOCK_RIVALS)
            rival = tl.load(keys + list_start + other, mask=other < total, other=NO_KEY)
            place += tl.sum((rival[None, :] > key[:, None]).to(tl.int32), axis=1)
        kept = inside & (place < width)
        slot = tl.load(places + list_start + entry, mask=kept, other=0)
        row = begin + ((0xFFFFFFFF - (key & 0xFFFFFFFF)) // size).to(tl.int32)
        row = tl.where(kept, row, begin)
        at = tl.load(node + row, mask=kept, other=0)
        child, code = read_slots(slot, at, child_start, child_code, table, size, kept, DENSE)
        held = tl.load(bits + row.to(tl.int64) * slots + slot, mask=kept, other=0)
        target = to + place
        tl.store(out_node + target, child, mask=kept)
        tl.store(out_score + target, held.to(tl.float32, bitcast=True), mask=kept)
        tl.store(out_valid + target, kept.to(tl.int8), mask=kept)
        tl.store(out_parent + target, row, mask=kept)
        tl.store(out_code + target, code, mask=kept)
