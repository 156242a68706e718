"""Reading, joining and splitting purchase histories.

A file is a table with ``user_id``, ``history_item_ids`` (separated by spaces, oldest first) and, optionally,
``target_item_id`` (what the user took next; several are separated by spaces). An item stands there by its id, or by
its semantic ID in any notation of a catalog.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flashrec.errors import CatalogError
from flashrec.sid.source import GZIP_MAGIC, PARQUET_MAGIC, decode

COLUMNS = ("user_id", "history_item_ids", "target_item_id")


@dataclass(frozen=True, slots=True)
class History:
    """What one user took, oldest first; ``target`` is the held-out next item of a test row."""

    user: str
    items: tuple[str, ...]
    target: str | None = None

    @property
    def targets(self) -> tuple[str, ...]:
        """The items in :attr:`target`: one, save in a file that names several."""
        return () if self.target is None else tuple(self.target.split())


def read_histories(path: Path) -> list[History]:
    """Rows of a histories file, in file order: CSV, TSV or Parquet, compressed by gzip or not.

    Raises :class:`CatalogError` naming file and row.
    """
    rows = []
    for number, row in _records(path):
        missing = {"user_id", "history_item_ids"} - set(row)
        if missing:
            raise CatalogError(f"{path}: no column {sorted(missing)}; the header needs {', '.join(COLUMNS)}")
        items = _names(row["history_item_ids"])
        if not items:
            raise CatalogError(f"{path}: row {number}: empty history_item_ids")
        rows.append(History(str(row["user_id"]), items, " ".join(_names(row.get("target_item_id"))) or None))
    if not rows:
        raise CatalogError(f"{path}: no rows")
    return rows


def _records(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """Row numbers (a text table's header is row 1) and cells by column."""
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if data[:2] == GZIP_MAGIC else data
    except (OSError, EOFError, zlib.error) as error:
        raise CatalogError(f"{path}: cannot read the histories: {error}") from error
    if data[:4] == PARQUET_MAGIC:
        yield from _parquet_records(path, data)
        return
    text = decode(path, data).removeprefix("\ufeff")
    separator = "\t" if "\t" in text.split("\n", 1)[0] else ","
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator)
    try:
        for number, row in enumerate(reader, start=2):
            if None in row:
                raise CatalogError(f"{path}: row {number}: more cells than the header has columns")
            yield number, dict(row)
    except csv.Error as error:
        raise CatalogError(f"{path}: line {reader.line_num}: not a table: {error}") from error


def _parquet_records(path: Path, data: bytes) -> Iterator[tuple[int, dict[str, object]]]:
    import pandas as pd

    try:
        records = pd.read_parquet(io.BytesIO(data)).to_dict("records")
    except Exception as error:  # pyarrow's errors have no base class of their own
        raise CatalogError(f"{path}: broken Parquet file: {' '.join(str(error).split())[:200]}") from error
    for number, row in enumerate(records, start=1):
        yield number, {str(name): cell for name, cell in row.items()}


def _names(cell: object) -> tuple[str, ...]:
    """Item ids of a cell: separated by spaces, a list, one number, or none."""
    if isinstance(cell, list | tuple | np.ndarray):
        return tuple(map(str, cell))
    return () if cell is None or cell != cell else tuple(str(cell).split())


def write_histories(path: Path, histories: Iterable[History]) -> None:
    """Write the file that :func:`read_histories` reads."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows((h.user, " ".join(h.items), h.target or "") for h in histories)


def hold_out(histories: Iterable[History]) -> list[History]:
    """Turn each history into a test row whose target is its last item."""
    return [History(h.user, h.items[:-1], h.items[-1]) for h in histories]


def join_windows(histories: Sequence[History]) -> list[History]:
    """Rebuild each user's sequences from overlapping windows; targets are ignored.

    Windows are joined in file order: one that repeats the end of the sequence so far extends it by what is
    new; one that lies inside it adds nothing; any other starts a new sequence of that user.
    """
    by_user: dict[str, list[list[str]]] = {}
    for history in histories:
        window = list(history.items)
        sequences = by_user.setdefault(history.user, [])
        if any(_contains(sequence, window) for sequence in sequences):
            continue
        for sequence in sequences:
            shared = _overlap(sequence, window)
            if shared:
                sequence += window[shared:]
                break
        else:
            sequences.append(window)
    return [History(user, tuple(s)) for user, sequences in by_user.items() for s in sequences]


def drop_held_out(histories: Iterable[History], held_out: Iterable[History]) -> list[History]:
    """Cut sequences between ``last`` and ``target`` wherever a test row of that user has this pair.

    What follows the cut is a sequence of its own, so no training context reaches across a test transition.
    """
    banned = transitions_of_rows(held_out)
    out = []
    for history in histories:
        start = 0
        for i in range(1, len(history.items)):
            if (history.user, history.items[i - 1], history.items[i]) in banned:
                out.append(History(history.user, history.items[start:i]))
                start = i
        out.append(History(history.user, history.items[start:]))
    return out


def transitions_of_rows(rows: Iterable[History]) -> set[tuple[str, str, str]]:
    """The (user, last item, target) triples of test rows."""
    return {(row.user, row.items[-1], row.target) for row in rows if row.target is not None}


def assert_no_leak(training: Iterable[History], held_out: Iterable[History]) -> None:
    """Raise :class:`CatalogError` if any training sequence holds a test row's transition of its user."""
    banned = transitions_of_rows(held_out)
    for history in training:
        for last, following in itertools.pairwise(history.items):
            if (history.user, last, following) in banned:
                raise CatalogError(
                    f"leak: user {history.user}: {last} -> {following} is a held-out row and a training "
                    "transition; pass the held-out file to make-checkpoint so that it is dropped"
                )


def _contains(sequence: Sequence[str], window: Sequence[str]) -> bool:
    size = len(window)
    return any(list(sequence[i : i + size]) == list(window) for i in range(len(sequence) - size + 1))


def _overlap(sequence: Sequence[str], window: Sequence[str]) -> int:
    """Length of the longest proper prefix of ``window`` that ends ``sequence``."""
    for size in range(min(len(sequence), len(window) - 1), 0, -1):
        if list(sequence[-size:]) == list(window[:size]):
            return size
    return 0
