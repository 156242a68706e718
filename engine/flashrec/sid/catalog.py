"""The set of semantic IDs that exist, and the items that each one names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flashrec.errors import CatalogError
from flashrec.sid.codes import Packing
from flashrec.sid.formats import read_json
from flashrec.sid.layout import SidLayout
from flashrec.sid.rows import Rows
from flashrec.sid.source import bad_row, is_json, read_bytes
from flashrec.sid.strings import StringTable
from flashrec.sid.tables import read_table

_KEY_BITS = 63


@dataclass(frozen=True, eq=False)
class Catalog:
    """Distinct SIDs in lexicographic order with their items.

    ``sids``: int32 ``[num_sids, depth]``, sorted, distinct. ``item_start``: int32 ``[num_sids + 1]``; the
    items of SID ``i`` are ``items[item_start[i]:item_start[i + 1]]``, in the order of the file. ``titles`` go
    with ``items``, or are ``None``. ``digest`` is a hash of SIDs and items, the same for every file format.
    ``has_end_level`` says that the file had a trailing end level, which ``sids`` leaves out. ``duplicates``
    counts rows that repeated a (SID, item) pair and were dropped.
    """

    sids: NDArray[np.int32]
    item_start: NDArray[np.int32]
    items: StringTable
    titles: StringTable | None
    digest: str
    path: Path
    has_end_level: bool = False
    duplicates: int = 0

    @property
    def depth(self) -> int:
        return int(self.sids.shape[1])

    @property
    def num_sids(self) -> int:
        return len(self.sids)

    @property
    def num_items(self) -> int:
        """(SID, item) pairs; an item under two SIDs counts twice."""
        return len(self.items)

    def rank(self, sids: NDArray[np.integer] | Sequence[Sequence[int]]) -> NDArray[np.int32]:
        """int32 ``[n]``: the row of each of ``sids`` (``[n, depth]``), -1 where it is absent."""
        queries = np.asarray(sids, dtype=np.int64).reshape(-1, self.depth)
        low = np.zeros(len(queries), dtype=np.int64)
        high = np.full(len(queries), self.num_sids, dtype=np.int64)
        for level in range(self.depth):
            column, codes = self.sids[:, level], queries[:, level]
            low, high = _bound(column, low, high, codes), _bound(column, low, high, codes + 1)
        return np.where(low < high, low, -1).astype(np.int32)

    def items_of(self, rank: int) -> tuple[str, ...]:
        """The items of the SID in row ``rank``."""
        return tuple(self.items[self.item_start[rank] : self.item_start[rank + 1]])

    def items_of_all(self, ranks: NDArray[np.integer]) -> list[tuple[str, ...]]:
        """:meth:`items_of` for int ``[n]`` ranks, without a look-up per rank."""
        first, last = self.item_start[ranks].astype(np.int64), self.item_start[ranks + 1].astype(np.int64)
        ends = np.cumsum(last - first)
        positions = np.arange(ends[-1] if len(ends) else 0) + np.repeat(last - ends, last - first)
        names = list(self.items.take(positions))
        return [
            tuple(names[begin:end]) for begin, end in zip((ends - last + first).tolist(), ends.tolist(), strict=True)
        ]

    def ranks_of_items(self, item_ids: Iterable[str]) -> NDArray[np.int32]:
        """int32, sorted, distinct: the SIDs that name at least one of ``item_ids``.

        Raises :class:`CatalogError` naming the first item that the catalog does not have.
        """
        ranks: NDArray[np.int32] = np.unique(self._ranks(self._positions(item_ids)))
        return ranks

    def ranks_emptied_by(self, item_ids: Iterable[str]) -> NDArray[np.int32]:
        """int32, sorted: the SIDs that excluding ``item_ids`` removes: all their items are among these.

        Raises :class:`CatalogError` naming the first item that the catalog does not have.
        """
        ranks, removed = np.unique(self._ranks(self._positions(item_ids)), return_counts=True)
        emptied: NDArray[np.int32] = ranks[removed == np.diff(self.item_start)[ranks]]
        return emptied

    def _positions(self, item_ids: Iterable[str]) -> NDArray[np.int64]:
        found: list[int] = []
        for item in dict.fromkeys(item_ids):
            positions = self.items.positions(item)
            if not positions:
                raise CatalogError(f"{self.path}: no item {item!r} in the catalog")
            found.extend(positions)
        return np.array(found, dtype=np.int64)

    def _ranks(self, positions: NDArray[np.int64]) -> NDArray[np.int32]:
        return (np.searchsorted(self.item_start, positions, side="right") - 1).astype(np.int32)


def _bound(
    column: NDArray[np.int32], low: NDArray[np.int64], high: NDArray[np.int64], codes: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Per query, the first row in ``low .. high`` whose code is not below ``codes`` (bisection)."""
    low, high = low.copy(), high.copy()
    while np.any(open_ := low < high):
        middle = (low + high) // 2
        below = open_ & (column[np.minimum(middle, len(column) - 1)] < codes)
        low = np.where(below, middle + 1, low)
        high = np.where(open_ & ~below, middle, high)
    return low


def load_catalog(
    path: Path | str,
    layout: SidLayout | None,
    *,
    sid_sizes: Sequence[int] | None = None,
    packing: Packing | None = None,
) -> Catalog:
    """Read a catalog in any format of SPEC S2, recognised by content.

    Codes are checked against ``layout``'s codebooks, or against ``sid_sizes`` without a layout. ``packing``
    says that the keys are packed integers, and their base and depth. SIDs of unequal depth are refused.
    Raises :class:`CatalogError` with file, row and reason.
    """
    path = Path(path)
    rows = _read(path, layout, packing)
    sizes = layout.sizes if layout is not None else sid_sizes
    if sizes is None:
        return assemble(path, rows, has_end_level=False)
    has_end = layout is None or layout.end is not None
    codes, has_end_level = _without_end_level(path, rows, len(sizes), has_end=has_end)
    _check_codes(path, codes, rows.numbers, sizes)
    return assemble(path, Rows(codes, rows.items, rows.titles, rows.numbers), has_end_level=has_end_level)


def _read(path: Path, layout: SidLayout | None, packing: Packing | None) -> Rows:
    data = read_bytes(path)
    return (read_json if is_json(data) else read_table)(path, data, layout, packing)


def _without_end_level(path: Path, rows: Rows, depth: int, *, has_end: bool) -> tuple[NDArray[np.int32], bool]:
    """Drop a last level that only says "end": the same code, 0 or 1, in every row."""
    found = rows.codes.shape[1]
    if found == depth:
        return rows.codes, False
    if found != depth + 1 or not has_end:
        raise bad_row(path, int(rows.numbers[0]), f"{found} codes per SID, but the layout has {depth} levels")
    last = rows.codes[:, -1]
    odd = np.flatnonzero((last != last[0]) | (last > 1))
    if len(odd):
        raise bad_row(
            path,
            int(rows.numbers[odd[0]]),
            f"{found} codes per SID, but the layout has {depth} levels, and the last code is no end level: "
            f"it is {last[odd[0]]} here and {last[0]} in row {rows.numbers[0]}",
        )
    return np.ascontiguousarray(rows.codes[:, :-1]), True


def _check_codes(path: Path, codes: NDArray[np.int32], numbers: NDArray[np.int32], sizes: Sequence[int]) -> None:
    outside = codes >= np.array(sizes, dtype=np.int64)
    if np.any(outside):
        row, level = (int(index) for index in np.argwhere(outside)[0])
        raise bad_row(
            path,
            int(numbers[row]),
            f"level {level} has codes 0 to {sizes[level] - 1}, not {codes[row, level]}",
        )


def sort_order(codes: NDArray[np.int32]) -> NDArray[np.intp]:
    """The stable order that sorts the rows of ``codes`` lexicographically.

    Rows whose codes fit 63 bits are sorted as one integer each; others column by column.
    """
    bits = [max(1, int(column.max()).bit_length()) for column in codes.T]
    if sum(bits) > _KEY_BITS:
        return np.lexsort(codes.T[::-1])
    key = codes[:, 0].astype(np.int64)
    for column, width in zip(codes.T[1:], bits[1:], strict=True):
        key <<= width
        key |= column
    return np.argsort(key, kind="stable")


def assemble(path: Path, rows: Rows, *, has_end_level: bool) -> Catalog:
    """Sort the rows, group items by SID, and drop repeated (SID, item) pairs."""
    order = sort_order(rows.codes)
    codes = rows.codes[order]
    is_first = np.ones(len(codes), dtype=np.bool_)
    is_first[1:] = np.any(codes[1:] != codes[:-1], axis=1)
    starts = np.append(np.flatnonzero(is_first), len(codes))
    kept = _distinct_items(order, starts, rows.items)
    source = order if kept.all() else order[kept]
    items = rows.items.take(source)
    titles = None if rows.titles is None else rows.titles.take(source)
    sids = codes if is_first.all() else codes[starts[:-1]]
    item_start = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(kept)))[starts].astype(np.int32)
    return Catalog(
        sids=sids,
        item_start=item_start,
        items=items,
        titles=titles,
        digest=content_digest(sids, item_start, items),
        path=path,
        has_end_level=has_end_level,
        duplicates=len(codes) - len(items),
    )


def _distinct_items(order: NDArray[np.intp], starts: NDArray[np.intp], items: Sequence[str]) -> NDArray[np.bool_]:
    """Which sorted rows to keep: the first of each item within its SID."""
    kept = np.ones(len(order), dtype=np.bool_)
    for group in np.flatnonzero(np.diff(starts) > 1):
        seen: set[str] = set()
        for row in range(starts[group], starts[group + 1]):
            item = items[order[row]]
            kept[row] = item not in seen
            seen.add(item)
    return kept


def content_digest(sids: NDArray[np.int32], item_start: NDArray[np.int32], items: StringTable) -> str:
    """Hex BLAKE2b-128 over shape, SIDs and items; titles and the file's format do not count."""
    digest = hashlib.blake2b(repr(sids.shape).encode(), digest_size=16)
    for array in (sids, item_start, items.offsets, items.blob):
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
