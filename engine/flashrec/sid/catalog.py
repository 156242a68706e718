"""The set of semantic IDs that exist, and the items that each one names."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import orjson
from numpy.typing import NDArray

from flashrec.errors import CatalogError
from flashrec.request import JsonColumn
from flashrec.sid.codes import Packing
from flashrec.sid.formats import read_json
from flashrec.sid.layout import SidLayout
from flashrec.sid.rows import Rows
from flashrec.sid.sorting import distinct, sort_rows
from flashrec.sid.source import bad_row, is_json, read_bytes
from flashrec.sid.string_index import StringIndex, hash_strings
from flashrec.sid.strings import StringTable
from flashrec.sid.tables import read_table


@dataclass(frozen=True, eq=False)
class Catalog:
    """Distinct SIDs in lexicographic order with their items.

    ``sids``: int32 ``[num_sids, depth]``, sorted, distinct. ``item_start``: int32 ``[num_sids + 1]``; the
    items of SID ``i`` are ``items[item_start[i]:item_start[i + 1]]``, in the order of the file. ``titles`` go
    with ``items``, or are ``None``. ``index`` finds an item's positions in ``items``. ``digest`` is a hash of SIDs
    and items, the same for every file format.
    Each SID has one item or more. ``plain_items`` says that no item has a character that JSON would escape.
    ``has_end_level`` says that the file had a trailing end level, which ``sids`` leaves out. ``duplicates``
    counts rows that repeated a (SID, item) pair and were dropped.
    """

    sids: NDArray[np.int32]
    item_start: NDArray[np.int32]
    items: StringTable
    index: StringIndex
    titles: StringTable | None
    digest: str
    path: Path
    has_end_level: bool = False
    duplicates: int = 0
    plain_items: bool = False
    _first_row: NDArray[np.int64] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # Where the SIDs of each first code begin: half of what rank() would have to bisect.
        counts = np.bincount(self.sids[:, 0])
        object.__setattr__(self, "_first_row", np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts))))

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
        codes = queries[:, 0]
        known = (codes >= 0) & (codes < len(self._first_row) - 1)
        codes = np.where(known, codes, 0)
        low, high = self._first_row[codes], np.where(known, self._first_row[codes + 1], 0)
        for level in range(1, self.depth):
            column, codes = self.sids[:, level], queries[:, level]
            low = _bound(column, low, high, codes)
            high = _bound(column, low, high, codes + 1)
        return np.where(low < high, low, -1).astype(np.int32)

    def items_of(self, rank: int) -> tuple[str, ...]:
        """The items of the SID in row ``rank``."""
        return tuple(self.items[self.item_start[rank] : self.item_start[rank + 1]])

    def items_of_all(self, ranks: NDArray[np.integer]) -> list[tuple[str, ...]]:
        """:meth:`items_of` for int ``[n]`` ranks, without a look-up per rank."""
        if self.num_items == self.num_sids:
            return list(zip(self.items.pick(ranks), strict=True))
        positions, spans = self._items_at(ranks)
        names = self.items.pick(positions)
        return [tuple(names[span]) for span in spans]

    def _items_at(self, ranks: NDArray[np.integer]) -> tuple[NDArray[np.int64], list[slice]]:
        """The positions of all items of ``ranks`` in :attr:`items`, and where among these those of each rank are."""
        last = self.item_start[ranks + 1]
        counts = last - self.item_start[ranks]
        ends = np.cumsum(counts, dtype=np.int64)
        positions = np.arange(int(counts.sum())) + np.repeat(last - ends, counts)
        return positions, list(map(slice, (ends - counts).tolist(), ends.tolist()))

    def items_json(self, ranks: NDArray[np.integer]) -> JsonColumn:
        """:meth:`items_of_all` as JSON's lists of strings.

        Of 256 ranks of one item each: 69 us from bytes that are JSON already, 113 from strings; with nothing in a
        processor's caches 261 and 547 (Intel Xeon, 2026-12-02).
        """
        if not self.plain_items:
            return JsonColumn(list(map(orjson.dumps, self.items_of_all(ranks))))
        if self.num_items == self.num_sids:
            return JsonColumn(self.items.slices(ranks), b'["', b'"]')
        positions, spans = self._items_at(ranks)
        names = self.items.slices(positions)
        return JsonColumn([b'","'.join(names[span]) for span in spans], b'["', b'"]')

    def ranks_of_items(self, item_ids: Sequence[str]) -> NDArray[np.int32]:
        """int32, sorted, distinct: the SIDs that name at least one of ``item_ids``.

        Raises :class:`CatalogError` naming the first item that the catalog does not have.
        """
        return distinct(self._ranks(self._positions(item_ids)))[0]

    def ranks_emptied_by(self, item_ids: Sequence[str]) -> NDArray[np.int32]:
        """int32, sorted: the SIDs that excluding ``item_ids`` removes: all their items are among these.

        Raises :class:`CatalogError` naming the first item that the catalog does not have.
        """
        ranks, removed = distinct(self._ranks(self._positions(item_ids)))
        emptied: NDArray[np.int32] = ranks[removed == self.item_start[ranks + 1] - self.item_start[ranks]]
        return emptied

    def title_of(self, item: str) -> str | None:
        """The title of an item, of its first row where it has several; ``None`` without titles or without the item."""
        return self.titles_of([item])[0]

    def titles_of(self, items: Sequence[str]) -> list[str | None]:
        """:meth:`title_of` for several items at once: of a thousand each takes 1.5 us, not 125
        (AMD EPYC, 2026-12-02)."""
        found: list[str | None] = [None] * len(items)
        if self.titles is None or not items:
            return found
        query, positions = self.index.find(self.items, StringTable.of(list(items)))
        first = np.full(len(items), len(self.items), dtype=np.int64)
        np.minimum.at(first, query, positions)
        known = np.flatnonzero(first < len(self.items))
        for place, title in zip(known.tolist(), self.titles.pick(first[known]), strict=True):
            found[place] = title
        return found

    def _positions(self, item_ids: Sequence[str]) -> NDArray[np.int64]:
        """int64, sorted, distinct: every position of every one of ``item_ids`` in :attr:`items`."""
        try:
            wanted = StringTable.of(list(item_ids))
        except UnicodeEncodeError as error:
            raise CatalogError(f"no item {error.object[:60]!r} in the catalog") from None
        query, positions = self.index.find(self.items, wanted)
        known = np.zeros(len(wanted), dtype=np.bool_)
        known[query] = True
        if not known.all():
            raise CatalogError(f"no item {wanted[int(np.argmin(known))]!r} in the catalog")
        return distinct(positions)[0]

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
    has_end_level = _drop_end_level(path, rows, len(sizes), has_end=has_end)
    _check_codes(path, rows, sizes)
    return assemble(path, rows, has_end_level=has_end_level)


def _read(path: Path, layout: SidLayout | None, packing: Packing | None) -> Rows:
    data = read_bytes(path)
    return (read_json if is_json(data) else read_table)(path, data, layout, packing)


def _drop_end_level(path: Path, rows: Rows, depth: int, *, has_end: bool) -> bool:
    """Drop a last level that only says "end": the same code, 0 or 1, in every row. Says whether there was one."""
    found = rows.codes.shape[1]
    if found == depth:
        return False
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
    rows.codes = np.ascontiguousarray(rows.codes[:, :-1])
    return True


def _check_codes(path: Path, rows: Rows, sizes: Sequence[int]) -> None:
    """The first row with a code outside its codebook is an error."""
    outside = [np.flatnonzero(column >= size) for column, size in zip(rows.codes.T, sizes, strict=True)]
    bad = [(int(found[0]), level) for level, found in enumerate(outside) if len(found)]
    if bad:
        row, level = min(bad)
        raise bad_row(
            path,
            int(rows.numbers[row]),
            f"level {level} has codes 0 to {sizes[level] - 1}, not {rows.codes[row, level]}",
        )


def assemble(path: Path, rows: Rows, *, has_end_level: bool) -> Catalog:
    """Sort the rows, group items by SID, and drop repeated (SID, item) pairs. Takes ``rows`` apart."""
    del rows.numbers
    codes, order, is_first = sort_rows(rows)
    starts = np.append(np.flatnonzero(is_first), len(order)).astype(np.int32)
    sids = codes if is_first.all() else codes[is_first]
    del codes, is_first
    kept = _distinct_items(order, starts, rows.items)
    duplicates = len(order) - int(np.count_nonzero(kept))
    if duplicates:
        starts = np.concatenate((np.zeros(1, dtype=np.int32), np.cumsum(kept, dtype=np.int32)))[starts]
        order = order[kept]
    items = rows.items.take(order)
    del rows.items
    titles = None if rows.titles is None else rows.titles.take(order)
    del rows.titles, order
    return Catalog(
        sids=sids,
        item_start=starts,
        items=items,
        index=StringIndex.build(items),
        titles=titles,
        digest=content_digest(sids, starts, items),
        path=path,
        has_end_level=has_end_level,
        duplicates=duplicates,
        plain_items=items.is_plain(),
    )


def _distinct_items(order: NDArray[np.int32], starts: NDArray[np.int32], items: StringTable) -> NDArray[np.bool_]:
    """Which sorted rows to keep: the first of each item within its SID."""
    kept = np.ones(len(order), dtype=np.bool_)
    sizes = np.diff(starts)
    shared = np.flatnonzero(np.repeat(sizes > 1, sizes))
    if not len(shared):
        return kept
    group = np.searchsorted(starts, shared, side="right")
    hashes = hash_strings(items.take(order[shared]))
    by_hash = np.lexsort((hashes, group))
    group, hashes = group[by_hash], hashes[by_hash]
    alike = np.flatnonzero((group[1:] == group[:-1]) & (hashes[1:] == hashes[:-1]))
    for number in np.unique(group[alike]).tolist():
        seen: set[str] = set()
        for row in range(starts[number - 1], starts[number]):
            item = items[int(order[row])]
            kept[row] = item not in seen
            seen.add(item)
    return kept


def content_digest(sids: NDArray[np.int32], item_start: NDArray[np.int32], items: StringTable) -> str:
    """Hex BLAKE2b-128 over shape, SIDs and items; titles and the file's format do not count."""
    digest = hashlib.blake2b(repr(sids.shape).encode(), digest_size=16)
    for array in (sids, item_start, items.offsets, items.blob):
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
