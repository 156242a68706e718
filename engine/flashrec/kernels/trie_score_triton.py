"""Device half one of the trie step: every row's normaliser and the scores of its legal children.

One program holds one row. It adds up the row's exponentials in an order that the number of columns alone
decides, so a row has the same bits in every wave, then walks the row's *slots* (its edges in the trie, or
the codes of a dense table), gathers their logits and writes each slot's score, and the best key of every
group of slots.
"""

from __future__ import annotations

from flashrec.kernels._triton import jit, tl

NO_KEY: tl.constexpr = tl.constexpr(-(1 << 63))
"""Below the key of every legal candidate."""
NO_SCORE: tl.constexpr = tl.constexpr(-1)
"""Bits of a slot that holds no legal candidate: a NaN that arithmetic does not make."""


@jit
def order_key(bits: tl.tensor, rank: tl.tensor) -> tl.tensor:
    """Device: int64 keys that fall as scores fall (float32 ``bits``; -0.0 is 0.0), then as ``rank`` int64 rises."""
    bits = tl.where(bits == -0x80000000, 0, bits)
    # Flipping the magnitude of negative floats makes their integer order their numeric order.
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0xFFFFFFFF - rank)


@jit
def read_slots(
    slot: tl.tensor,
    node: tl.tensor,
    child_start: tl.tensor,
    child_code: tl.tensor,
    table: tl.tensor,
    size: tl.tensor,
    wanted: tl.tensor,
    DENSE: tl.constexpr,
) -> tl.tensor:
    """Device: (child node, or -1 where there is none or it is not ``wanted``; code) of a node's slots."""
    if DENSE:
        child = tl.load(table + node.to(tl.int64) * size + slot, mask=wanted & (slot < size), other=-1)
        code = slot
    else:
        begin = tl.load(child_start + node)
        inside = wanted & (slot < tl.load(child_start + node + 1) - begin)
        child = tl.where(inside, begin + slot, -1)
        code = tl.load(child_code + begin + slot, mask=inside, other=0).to(tl.int32)
    return child, code


@jit
def _keys_below(keys: tl.tensor, count: tl.tensor, steps: tl.tensor, bound: tl.tensor) -> tl.tensor:
    """Device: how many of the sorted int64 ``keys[count]`` are below ``bound``, after ``steps`` halvings."""
    low = tl.zeros_like(bound)
    high = low + count
    for _ in range(0, steps):
        middle = (low + high) >> 1
        right = tl.load(keys + middle, mask=low < high, other=NO_KEY) < bound
        right = right & (low < high)
        high = tl.where(right, high, middle)
        low = tl.where(right, middle + 1, low)
    return low


@jit
def _legal_logits(
    slot: tl.tensor,
    slots: tl.tensor,
    node: tl.tensor,
    owner: tl.tensor,
    logits_row: tl.tensor,
    columns: tl.tensor,
    child_start: tl.tensor,
    child_code: tl.tensor,
    table: tl.tensor,
    size: tl.tensor,
    leaf_start: tl.tensor,
    list_keys: tl.tensor,
    list_allow: tl.tensor,
    list_exclude: tl.tensor,
    list_stride: tl.tensor,
    list_count: tl.tensor,
    list_steps: tl.tensor,
    DENSE: tl.constexpr,
    HAS_LEAVES: tl.constexpr,
    HAS_LISTS: tl.constexpr,
) -> tl.tensor:
    """Device: (float32 logit, whether there is a candidate, code) of a node's slots."""
    child, code = read_slots(slot, node, child_start, child_code, table, size, slot < slots, DENSE)
    legal = child >= 0
    if HAS_LISTS:
        if HAS_LEAVES:
            first = tl.load(leaf_start + child, mask=legal, other=0).to(tl.int64)
            last = tl.load(leaf_start + child + 1, mask=legal, other=0).to(tl.int64)
        else:
            first = child.to(tl.int64)
            last = first + 1
        base = owner * list_stride
        listed = _keys_below(list_keys, list_count, list_steps, base + last)
        listed -= _keys_below(list_keys, list_count, list_steps, base + first)
        legal = legal & ((tl.load(list_allow + owner) == 0) | (listed > 0))
        legal = legal & ((tl.load(list_exclude + owner) == 0) | (listed < last - first))
    column = tl.load(columns + code, mask=legal, other=0)
    return tl.load(logits_row + column, mask=legal, other=0.0).to(tl.float32), legal, code


@jit
def _read_row(row: tl.tensor, column: tl.tensor, size: tl.tensor, SCORES: tl.constexpr) -> tl.tensor:
    """Device: float32 values of a row of logits, or (``SCORES``) of score bits with -inf where there is none."""
    if SCORES:
        bits = tl.load(row + column, mask=column < size, other=NO_SCORE)
        return tl.where(bits == NO_SCORE, float("-inf"), bits.to(tl.float32, bitcast=True))
    return tl.load(row + column, mask=column < size, other=float("-inf")).to(tl.float32)


@jit
def _log_sum_exp(row: tl.tensor, size: tl.tensor, SCORES: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """Device: of one row, summed lane by lane over its blocks and then across the lanes."""
    lane = tl.arange(0, BLOCK)
    peaks = tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in range(0, size, BLOCK):
        peaks = tl.maximum(peaks, _read_row(row, first + lane, size, SCORES))
    peak = tl.max(peaks, axis=0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    terms = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, size, BLOCK):
        terms += tl.exp(_read_row(row, first + lane, size, SCORES) - peak)
    total = tl.sum(terms, axis=0)
    # A row without a finite value has no candidate that could be scored.
    return peak + tl.log(tl.where(total == 0.0, 1.0, total))


@jit
def _store_scores(
    bits_row: tl.tensor,
    peaks_row: tl.tensor,
    slot: tl.tensor,
    first: tl.tensor,
    slots: tl.tensor,
    groups: tl.tensor,
    picked: tl.tensor,
    legal: tl.tensor,
    base: tl.tensor,
    normaliser: tl.tensor,
    rank: tl.tensor,
    BLOCK_SLOTS: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """Device: the scores of a block of slots, and the best key of each of its groups."""
    score = base + (picked - normaliser)
    bits = tl.where(score == score, score, float("nan")).to(tl.int32, bitcast=True)
    tl.store(bits_row + slot, tl.where(legal, bits, NO_SCORE), mask=slot < slots)
    keys = tl.where(legal, order_key(bits, rank), NO_KEY)
    if GROUP > 1:
        keys = tl.max(tl.reshape(keys, (BLOCK_SLOTS // GROUP, GROUP)), axis=1)
    group = first // GROUP + tl.arange(0, BLOCK_SLOTS // GROUP)
    tl.store(peaks_row + group, keys, mask=group < groups)


@jit
def score_kernel(
    logits: tl.tensor,
    columns: tl.tensor,
    order: tl.tensor,
    child_start: tl.tensor,
    child_code: tl.tensor,
    table: tl.tensor,
    leaf_start: tl.tensor,
    node: tl.tensor,
    score: tl.tensor,
    valid: tl.tensor,
    request: tl.tensor,
    spans: tl.tensor,
    list_keys: tl.tensor,
    list_allow: tl.tensor,
    list_exclude: tl.tensor,
    normalisers: tl.tensor,
    bits: tl.tensor,
    peaks: tl.tensor,
    logits_stride: tl.tensor,
    logits_size: tl.tensor,
    size: tl.tensor,
    slots: tl.tensor,
    groups: tl.tensor,
    requests: tl.tensor,
    list_stride: tl.tensor,
    list_count: tl.tensor,
    list_steps: tl.tensor,
    DENSE: tl.constexpr,
    HAS_LEAVES: tl.constexpr,
    HAS_LISTS: tl.constexpr,
    NORMALISE_LEGAL: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """One row a program: ``normalisers`` float32 [N], ``bits`` int32 [N, slots], ``peaks`` int64 [N, groups].

    ``logits`` [N, logits_size] by row stride; the other pointers as in :mod:`flashrec.kernels.trie_expand`, with
    booleans as bytes. A row that is not valid or in no span has no peaks, and its bits are not written.
    """
    row = tl.program_id(0).to(tl.int64)
    owner = tl.load(request + row)
    begin = tl.load(spans + owner)
    count = tl.load(spans + requests + owner)
    lane = tl.arange(0, BLOCK_SLOTS)
    bits_row = bits + row * slots
    peaks_row = peaks + row * groups
    if (row >= begin) & (row < begin + count) & (tl.load(valid + row) != 0):
        at = tl.load(node + row)
        base = tl.load(score + row)
        logits_row = logits + row * logits_stride
        parent = (row - begin) * size
        if NORMALISE_LEGAL:
            for first in range(0, slots, BLOCK_SLOTS):
                slot = first + lane
                picked, legal, code = _legal_logits(
                    slot,
                    slots,
                    at,
                    owner,
                    logits_row,
                    columns,
                    child_start,
                    child_code,
                    table,
                    size,
                    leaf_start,
                    list_keys,
                    list_allow,
                    list_exclude,
                    list_stride,
                    list_count,
                    list_steps,
                    DENSE,
                    HAS_LEAVES,
                    HAS_LISTS,
                )
                held = tl.where(legal, picked.to(tl.int32, bitcast=True), NO_SCORE)
                tl.store(bits_row + slot, held, mask=slot < slots)
            tl.debug_barrier()
            normaliser = _log_sum_exp(bits_row, slots, True, BLOCK_SLOTS)
        else:
            normaliser = _log_sum_exp(logits_row, logits_size, False, BLOCK_WIDTH)
        tl.store(normalisers + row, normaliser)
        for first in range(0, slots, BLOCK_SLOTS):
            slot = first + lane
            if NORMALISE_LEGAL:
                child, code = read_slots(slot, at, child_start, child_code, table, size, slot < slots, DENSE)
                held = tl.load(bits_row + slot, mask=slot < slots, other=NO_SCORE)
                legal = held != NO_SCORE
                picked = held.to(tl.float32, bitcast=True)
            else:
                picked, legal, code = _legal_logits(
                    slot,
                    slots,
                    at,
                    owner,
                    logits_row,
                    columns,
                    child_start,
                    child_code,
                    table,
                    size,
                    leaf_start,
                    list_keys,
                    list_allow,
                    list_exclude,
                    list_stride,
                    list_count,
                    list_steps,
                    DENSE,
                    HAS_LEAVES,
                    HAS_LISTS,
                )
            rank = parent + tl.load(order + code, mask=legal, other=0)
            _store_scores(
                bits_row,
                peaks_row,
                slot,
                first,
                slots,
                groups,
                picked,
                legal,
                base,
                normaliser,
                rank,
                BLOCK_SLOTS,
                GROUP,
            )
    else:
        for first in range(0, groups, BLOCK_SLOTS):
            tl.store(peaks_row + first + lane, tl.full((BLOCK_SLOTS,), NO_KEY, tl.int64), mask=first + lane < groups)
