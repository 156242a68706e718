"""What every catalog reader produces: (SID, item) pairs in file order, checked row by row."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flashrec.errors import CatalogError
from flashrec.sid.bulk import Block
from flashrec.sid.layout import Codes
from flashrec.sid.source import bad_row
from flashrec.sid.strings import StringBuilder, StringTable


@dataclass(eq=False)
class Rows:
    """One entry per (SID, item) pair.

    ``codes``: int32 ``[pairs, depth]``. ``numbers``: int32 ``[pairs]``, the row that each pair stands in.
    What sorts the rows deletes each array when it is done with it: together with their sorted copies they
    would be twice the catalog.
    """

    codes: NDArray[np.int32]
    items: StringTable
    titles: StringTable | None
    numbers: NDArray[np.int32]


class RowBuilder:
    """Collects pairs into arrays, so that a large catalog never exists as Python objects."""

    def __init__(self, path: Path, *, has_titles: bool = False) -> None:
        self._path = path
        self._codes = array("i")
        self._numbers = array("i")
        self._items = StringBuilder()
        self._titles = StringBuilder() if has_titles else None
        self._depth = 0

    def add(self, number: int, sid: Codes, item: str, title: str = "") -> None:
        """Add the pair in row ``number``.

        Raises :class:`CatalogError` for a depth other than the first row's, an empty item id, or text that
        UTF-8 cannot hold.
        """
        if len(sid) != self._depth:
            if self._depth:
                raise bad_row(
                    self._path,
                    number,
                    f"{len(sid)} codes, but row {self._numbers[0]} has {self._depth}: "
                    "all semantic IDs of a catalog need one depth",
                )
            self._depth = len(sid)
        if not item:
            raise bad_row(self._path, number, "the item id is empty")
        try:
            self._items.add(item)
            if self._titles is not None:
                self._titles.add(title)
        except UnicodeEncodeError as error:
            reason = f"{error.object[:60]!r} holds half of a character (a lone surrogate)"
            raise bad_row(self._path, number, reason) from error
        self._codes.extend(sid)
        self._numbers.append(number)

    def add_block(self, first: int, block: Block | None, titles: StringTable | None = None) -> bool:
        """Add a block whose first row is number ``first``; ``titles`` go with its items.

        Adds nothing and says ``False`` where :meth:`add` would refuse a row, or without a block: the rows are
        then added one by one, which finds the bad one.
        """
        if block is None or (self._titles is not None and titles is None):
            return False
        depth = block.codes.shape[1]
        if depth != (self._depth or depth) or not np.diff(block.items.offsets).all():
            return False
        self._depth = depth
        self._items.extend(block.items)
        if self._titles is not None and titles is not None:
            self._titles.extend(titles)
        self._codes.frombytes(block.codes.tobytes())
        self._numbers.frombytes((block.row + np.int32(first)).tobytes())
        return True

    def finish(self) -> Rows:
        """The arrays. Raises :class:`CatalogError` if nothing was added."""
        if not self._numbers:
            raise CatalogError(f"{self._path}: the catalog is empty")
        codes = np.frombuffer(self._codes, dtype=np.int32).reshape(-1, self._depth)
        titles = None if self._titles is None else self._titles.finish()
        return Rows(codes, self._items.finish(), titles, np.frombuffer(self._numbers, dtype=np.int32))
