"""Device half one of the trie step: every row's normaliser and the scores of its legal children.

A row's *slots* are its edges in the trie, or the codes of a dense table. The normaliser has a kernel of its
own, whose only compile-time choices follow from the number of values: a row has the same bits whatever its
wave's filters and sizes make of the other kernels.
"""

from __future__ import annotations

from functools import partial

from flashrec.kernels._triton import jit, tl

NO_KEY: tl.constexpr = tl.constexpr(-(1 << 63))
"""Below the key of every legal candidate."""
LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)
"""The least finite float32."""
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
def row_span(row: tl.tensor, request: tl.tensor, spans: tl.tensor, requests: tl.tensor) -> tl.tensor:
    """Device: (the row's request, its first source row, whether the row lies in its span)."""
    owner = tl.load(request + row)
    begin = tl.load(spans + owner)
    return owner, begin, (row >= begin) & (row < begin + tl.load(spans + requests + owner))


@jit
def _keys_below(keys: tl.tensor, count: tl.tensor, steps: tl.tensor, bound: tl.tensor) -> tl.tensor:
    """Device: how many of the sorted int64 ``keys[count]`` are below ``bound``, after ``steps`` halvings."""
    low = tl.zeros_like(bound)
    high = low + count
    for _ in range(steps):
        middle = (low + high) >> 1
        right = tl.load(keys + middle, mask=low < high, other=NO_KEY) < bound
        right = right & (low < high)
        high = tl.where(right, high, middle)
        low = tl.where(right, middle + 1, low)
    return low


@jit
def _alive(
    child: tl.tensor,
    leaf_start: tl.tensor,
    owner: tl.tensor,
    list_keys: tl.tensor,
    list_allow: tl.tensor,
    list_exclude: tl.tensor,
    list_stride: tl.tensor,
    list_count: tl.tensor,
    list_steps: tl.tensor,
    HAS_LEAVES: tl.constexpr,
) -> tl.tensor:
    """Device: whether request ``owner`` may return a SID under each child."""
    there = child >= 0
    if HAS_LEAVES:
        first = tl.load(leaf_start + child, mask=there, other=0).to(tl.int64)
        last = tl.load(leaf_start + child + 1, mask=there, other=0).to(tl.int64)
    else:
        first = child.to(tl.int64)
        last = first + 1
    base = owner * list_stride
    listed = _keys_below(list_keys, list_count, list_steps, base + last)
    listed -= _keys_below(list_keys, list_count, list_steps, base + first)
    allowed = (tl.load(list_allow + owner) == 0) | (listed > 0)
    return there & allowed & ((tl.load(list_exclude + owner) == 0) | (listed < last - first))


@jit
def _read_row(row: tl.tensor, column: tl.tensor, size: tl.tensor, SLOTS: tl.constexpr) -> tl.tensor:
    """Device: float32 values of a row of logits, or (``SLOTS``) of the bits of legal logits, else -inf."""
    if SLOTS:
        bits = tl.load(row + column, mask=column < size, other=NO_SCORE)
        return tl.where(bits == NO_SCORE, float("-inf"), bits.to(tl.float32, bitcast=True))
    return tl.load(row + column, mask=column < size, other=float("-inf")).to(tl.float32)


@jit
def normalise_kernel(
    values: tl.tensor,
    valid: tl.tensor,
    request: tl.tensor,
    spans: tl.tensor,
    normalisers: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    requests: tl.tensor,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One row a program: ``normalisers`` float32 [N], the log-sum-exp of ``values`` [N, size] by row stride.

    One pass over the values, as online softmax has it (Milakov and Gimelshein 2018): lane by lane over
    blocks, then across lanes. A row that is not valid or in no span is skipped.
    """
    row = tl.program_id(0).to(tl.int64)
    _, _, inside = row_span(row, request, spans, requests)
    if inside & (tl.load(valid + row) != 0):
        own = values + row * stride
        lane = tl.arange(0, BLOCK)
        peaks = tl.full((BLOCK,), LOWEST, tl.float32)
        terms = tl.zeros((BLOCK,), dtype=tl.float32)
        for first in range(0, size, BLOCK):
            value = _read_row(own, first + lane, size, SLOTS)
            # One exponential a value: of the new term, or of what the earlier terms shrink by.
            above = value - peaks
            factor = tl.exp(-tl.abs(above))
            terms = tl.where(above > 0.0, terms * factor + 1.0, terms + factor)
            peaks = tl.maximum(peaks, value)
        peak = tl.max(peaks, axis=0)
        total = tl.sum(terms * tl.exp(peaks - peak), axis=0)
        # A row without a finite value has no candidate whose score could be finite.
        tl.store(normalisers + row, peak + tl.log(tl.where(total == 0.0, 1.0, total)))


@partial(jit, varying=("list_count", "list_steps"))
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
    size: tl.tensor,
    slots: tl.tensor,
    groups: tl.tensor,
    requests: tl.tensor,
    list_stride: tl.tensor,
    list_count: tl.tensor,
    list_steps: tl.tensor,
    GATHER: tl.constexpr,
    FINISH: tl.constexpr,
    DENSE: tl.constexpr,
    HAS_LEAVES: tl.constexpr,
    HAS_LISTS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """One block of slots of one row a program: ``GATHER`` the legal logits, ``FINISH`` scores and group bests.

    Writes ``bits`` int32 [N, slots] (of scores, or of logits for a later ``FINISH``) and ``peaks`` int64
    [N, groups]. ``logits`` [N, W] by row stride; the other pointers as in
    :mod:`flashrec.kernels.trie_expand`, with booleans as bytes. A row that is not valid or in no span has no
    peaks, and its bits are not written.
    """
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    slot = first + tl.arange(0, BLOCK)
    owner, begin, inside = row_span(row, request, spans, requests)
    keys = tl.full((BLOCK,), NO_KEY, tl.int64)
    if inside & (tl.load(valid + row) != 0):
        child, code = read_slots(slot, tl.load(node + row), child_start, child_code, table, size, slot < slots, DENSE)
        own = bits + row * slots + slot
        if GATHER:
            legal = child >= 0
            if HAS_LISTS:
                legal = _alive(
                    child,
                    leaf_start,
                    owner,
                    list_keys,
                    list_allow,
                    list_exclude,
                    list_stride,
                    list_count,
                    list_steps,
                    HAS_LEAVES,
                )
            column = tl.load(columns + code, mask=legal, other=0)
            value = tl.load(logits + row * logits_stride + column, mask=legal, other=0.0).to(tl.float32)
        else:
            held = tl.load(own, mask=slot < slots, other=NO_SCORE)
            legal = held != NO_SCORE
            value = held.to(tl.float32, bitcast=True)
        if FINISH:
            value = tl.load(score + row) + (value - tl.load(normalisers + row))
        # One NaN for all, which is not NO_SCORE and comes before every number.
        new = tl.where(value == value, value, float("nan")).to(tl.int32, bitcast=True)
        tl.store(own, tl.where(legal, new, NO_SCORE), mask=slot < slots)
        if FINISH:
            rank = (row - begin) * size + tl.load(order + code, mask=legal, other=0)
            keys = tl.where(legal, order_key(new, rank), NO_KEY)
    if FINISH:
        if GROUP > 1:
            keys = tl.max(tl.reshape(keys, (BLOCK // GROUP, GROUP)), axis=1)
        group = first // GROUP + tl.arange(0, BLOCK // GROUP)
        tl.store(peaks + row * groups + group, keys, mask=group < groups)
