"""Reads TSV, CSV and Parquet catalogs through pandas (SPEC S2), which is imported for them alone: half a second."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from flashrec.errors import CatalogError
from flashrec.sid.bulk import BLOCK, Block, codes_of_columns, codes_of_texts, text_table
from flashrec.sid.codes import NotationError, Packing, parse_sid
from flashrec.sid.layout import Codes, SidLayout
from flashrec.sid.rows import RowBuilder, Rows
from flashrec.sid.source import PARQUET_MAGIC, bad_row, decode
from flashrec.sid.strings import StringTable

if TYPE_CHECKING:
    import pandas as pd

_LEVEL = re.compile(r"code_(0|[1-9][0-9]?)")
_DIGITS = re.compile(r"\s*[0-9]{1,9}\s*")


class TablePart(Protocol):
    """Some rows of a table; ``names`` are its columns.

    ``cells`` gives a column as it stands there, for the careful row-by-row reader; ``codes`` and ``texts`` give
    a whole column at once, or ``None`` where it holds anything but codes, or texts that are all there.
    """

    names: list[str]

    def __len__(self) -> int: ...
    def cells(self, name: str) -> list[object]: ...
    def codes(self, names: list[str]) -> NDArray[np.int32] | None: ...
    def texts(self, name: str) -> StringTable | None: ...


class TextPart:
    """Rows of a text table, all cells strings, or missing at the end of a short line."""

    def __init__(self, frame: pd.DataFrame) -> None:
        self.names: list[str] = frame.columns.tolist()
        self._frame = frame

    def __len__(self) -> int:
        return len(self._frame)

    def cells(self, name: str) -> list[object]:
        values: list[object] = self._frame[name].tolist()
        return values

    def codes(self, names: list[str]) -> NDArray[np.int32] | None:
        return codes_of_columns(list(map(self.cells, names)))

    def texts(self, name: str) -> StringTable | None:
        return text_table(self.cells(name))


def read_table(path: Path, data: bytes, layout: SidLayout | None, packing: Packing | None) -> Rows:
    """Read the columns ``item_id``, optional ``title``, and ``sid`` or ``code_0``, ``code_1``, ...

    Raises :class:`CatalogError`.
    """
    return _read_parts(path, _parts(path, data, BLOCK), layout, packing)


def table_depth(path: Path, data: bytes, packing: Packing | None) -> int:
    """Levels of the first row; of a text table ``data`` may be just the beginning.

    Raises :class:`CatalogError`.
    """
    first = itertools.islice(_parts(path, data, 1, lines=2), 1)
    return int(_read_parts(path, first, None, packing).codes.shape[1])


def _parts(path: Path, data: bytes, rows: int, lines: int | None = None) -> Iterator[TablePart]:
    """The table by blocks of at most ``rows`` rows, at least one; of a text table its first ``lines`` lines."""
    if data[:4] == PARQUET_MAGIC:
        yield from _parquet(path, data, rows)
        return
    frame = _text(path, data, lines)
    for first in range(0, max(len(frame), 1), rows):
        yield TextPart(frame.iloc[first : first + rows])


@dataclass(frozen=True)
class _Columns:
    """Which columns hold the SIDs, and what turns their cells into codes, one row or many at a time."""

    names: list[str]
    parse: Callable[[list[str]], Codes]
    parse_all: Callable[[TablePart], NDArray[np.int32] | None]


def _read_parts(path: Path, parts: Iterable[TablePart], layout: SidLayout | None, packing: Packing | None) -> Rows:
    rows: RowBuilder | None = None
    first = 1
    for part in parts:
        columns = _columns(path, part.names, layout, packing)
        rows = rows or RowBuilder(path, has_titles="title" in part.names)
        _add_part(path, rows, part, first, columns)
        first += len(part)
    return (rows or RowBuilder(path)).finish()


def _add_part(path: Path, rows: RowBuilder, part: TablePart, first: int, columns: _Columns) -> None:
    """Add the rows of ``part``, the first of which is number ``first``."""
    has_titles = "title" in part.names
    if rows.add_block(first, _block(part, columns), part.texts("title") if has_titles else None):
        return
    items = _cells(path, part, "item_id")
    titles = _cells(path, part, "title") if has_titles else [None] * len(items)
    cells = [_cells(path, part, name) for name in columns.names]
    for number, (item, title, *sid) in enumerate(zip(items, titles, *cells, strict=True), start=first):
        try:
            codes = columns.parse([_text_of(*cell) for cell in zip(columns.names, sid, strict=True)])
            rows.add(number, codes, _text_of("item_id", item), _title(title))
        except NotationError as error:
            raise bad_row(path, number, str(error)) from error


def _cells(path: Path, part: TablePart, name: str) -> list[object]:
    try:
        return part.cells(name)
    except (ValueError, ArithmeticError) as error:  # a date beyond Python's years, say
        raise CatalogError(f"{path}: column {name} cannot be read: {' '.join(str(error).split())[:200]}") from error


def _block(part: TablePart, columns: _Columns) -> Block | None:
    codes, items = columns.parse_all(part), part.texts("item_id")
    if codes is None or items is None:
        return None
    return Block(codes, items, np.arange(len(part), dtype=np.int32))


def _columns(path: Path, columns: list[str], layout: SidLayout | None, packing: Packing | None) -> _Columns:
    levels = _code_columns(path, columns)
    if levels:
        return _Columns(levels, lambda cells: _parse_levels(levels, cells), lambda part: part.codes(levels))
    if packing is not None:
        return _Columns(["sid"], lambda cells: packing.unpack(cells[0]), lambda part: None)
    return _Columns(["sid"], lambda cells: parse_sid(cells[0], layout), _codes_of_sids)


def _codes_of_sids(part: TablePart) -> NDArray[np.int32] | None:
    texts = part.texts("sid")
    return None if texts is None else codes_of_texts(texts[:])


def _code_columns(path: Path, columns: list[str]) -> list[str]:
    """The ``code_*`` columns in order, empty when ``sid`` holds the IDs. Raises :class:`CatalogError`."""
    found = ", ".join(map(repr, columns[:8]))[:120]
    if len(set(columns)) != len(columns):
        raise CatalogError(f"{path}: a column name occurs twice in the header: {found}")
    levels = sorted(int(match[1]) for match in map(_LEVEL.fullmatch, columns) if match)
    if "item_id" not in columns or not (levels or "sid" in columns):
        raise CatalogError(
            f"{path}: a table needs the columns item_id and either sid or code_0, code_1, ...; found {found}"
        )
    if levels and "sid" in columns:
        raise CatalogError(f"{path}: the table has both sid and code_{levels[0]}: keep one")
    for level, present in enumerate(levels):
        if level != present:
            raise CatalogError(f"{path}: column code_{level} is missing, code_{present} is there")
    return [f"code_{level}" for level in levels]


def _parse_levels(names: list[str], cells: list[str]) -> Codes:
    for name, cell in zip(names, cells, strict=True):
        if not _DIGITS.fullmatch(cell):
            raise NotationError(f"{name} is {cell[:60]!r}, not a code")
    return tuple(map(int, cells))


def _is_missing(value: object) -> bool:
    import pandas as pd

    return value is None or value is pd.NA or (isinstance(value, float) and value != value)


def _title(value: object) -> str:
    return "" if _is_missing(value) else _text_of("title", value)


def _text_of(name: str, value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if _is_missing(value):
        raise NotationError(f"{name} is missing")
    raise NotationError(f"{name} is {str(value)[:60]!r}, a {type(value).__name__}, not a string or an integer")


def _text(path: Path, data: bytes, lines: int | None = None) -> pd.DataFrame:
    """A text table, all cells strings; the first ``lines`` lines of it, or all."""
    import pandas as pd

    text = decode(path, data)
    separator = "\t" if "\t" in text.split("\n", 1)[0] else ","
    try:
        # No header row for pandas: with one it would take a surplus first column for an index, silently.
        frame = pd.read_csv(
            io.StringIO(text),
            sep=separator,
            header=None,
            nrows=lines,
            dtype=str,
            keep_default_na=False,
            na_values=[],
        )
    except ValueError as error:  # pandas' ParserError and EmptyDataError among them
        raise CatalogError(f"{path}: not a table: {' '.join(str(error).split())}") from error
    header = [str(name).strip() for name in frame.iloc[0].tolist()]
    frame = frame.iloc[1:].set_axis(header, axis="columns")
    if separator == "\t":
        _refuse_line_ends(path, frame)
    return frame


def _refuse_line_ends(path: Path, frame: pd.DataFrame) -> None:
    """A TSV cell over several lines is an unbalanced quote that has swallowed the rows behind it."""
    for position in range(frame.shape[1]):
        broken = frame.iloc[:, position].str.contains("[\r\n]").fillna(False)
        over = np.flatnonzero(broken.to_numpy(dtype=np.bool_))
        if len(over):
            raise bad_row(path, int(over[0]) + 1, "a quote at the start of a cell is not closed on its line")


def _parquet(path: Path, data: bytes, rows: int) -> Iterator[TablePart]:
    try:
        from flashrec.sid.parquet import parquet_parts
    except ImportError as error:
        raise CatalogError(f"{path}: reading Parquet needs pyarrow: install it") from error
    try:
        yield from parquet_parts(data, rows)
    except Exception as error:  # pyarrow's errors have no base class of their own
        raise CatalogError(f"{path}: broken Parquet file: {' '.join(str(error).split())[:200]}") from error
