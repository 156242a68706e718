"""Sorts catalog rows by their codes within little more memory than the rows take."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from flashrec.sid.rows import Rows

_KEY_BITS = 64

Sorted = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.bool_]]
"""Codes ``[rows, depth]`` in lexicographic order, the row that each came from, whether it is its SID's first."""


Number = TypeVar("Number", np.int32, np.int64)


def distinct(values: NDArray[Number]) -> tuple[NDArray[Number], NDArray[np.intp]]:
    """``values``, ``[n]``, sorted and once each, and how often each occurs: a third of ``np.unique``'s time."""
    ordered = np.sort(values)
    first = np.flatnonzero(np.concatenate((np.ones(min(len(ordered), 1), np.bool_), ordered[1:] != ordered[:-1])))
    return ordered[first], np.diff(np.append(first, len(ordered)))


def sort_rows(rows: Rows) -> Sorted:
    """Sort ``rows.codes`` lexicographically, equal ones in their order; deletes ``rows.codes``.

    Codes and row number that fit 64 bits together are sorted as one integer each, in place: 20 million rows of
    3 x 13 bits in 0.9 s, where a stable ``argsort`` takes 5 (one core of a server CPU, AVX-512, numpy 2.4,
    2026-11-30). Others are sorted column by column.
    """
    codes = rows.codes
    del rows.codes
    widths = [max(1, int(column.max()).bit_length()) for column in codes.T]
    row_bits = (len(codes) - 1).bit_length()
    if sum(widths) + row_bits > _KEY_BITS:
        return _by_column(codes)
    keys = _packed(codes, widths)
    del codes
    return _by_key(keys, widths, row_bits)


def _packed(codes: NDArray[np.int32], widths: list[int]) -> NDArray[np.uint64]:
    keys = codes[:, 0].astype(np.uint64)
    for column, width in zip(codes.T[1:], widths[1:], strict=True):
        keys <<= np.uint64(width)
        keys |= column.astype(np.uint64)
    return keys


def _by_key(keys: NDArray[np.uint64], widths: list[int], row_bits: int) -> Sorted:
    keys <<= np.uint64(row_bits)
    keys |= np.arange(len(keys), dtype=np.uint64)
    keys.sort()
    order = np.empty(len(keys), dtype=np.int32)
    np.bitwise_and(keys, np.uint64(2**row_bits - 1), out=order, casting="unsafe")
    keys >>= np.uint64(row_bits)
    is_first = np.ones(len(keys), dtype=np.bool_)
    np.not_equal(keys[1:], keys[:-1], out=is_first[1:])
    codes = np.empty((len(keys), len(widths)), dtype=np.int32)
    for level in reversed(range(len(widths))):
        np.bitwise_and(keys, np.uint64(2 ** widths[level] - 1), out=codes[:, level], casting="unsafe")
        keys >>= np.uint64(widths[level])
    return codes, order, is_first


def _by_column(codes: NDArray[np.int32]) -> Sorted:
    order = np.lexsort(codes.T[::-1]).astype(np.int32)
    codes = codes[order]
    is_first = np.ones(len(codes), dtype=np.bool_)
    is_first[1:] = np.any(codes[1:] != codes[:-1], axis=1)
    return codes, order, is_first
