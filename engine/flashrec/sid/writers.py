"""Writes a catalog in each of the formats that :func:`flashrec.sid.catalog.load_catalog` reads."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import tempfile
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flashrec.errors import CatalogError
from flashrec.sid.catalog import Catalog
from flashrec.sid.codes import Packing
from flashrec.sid.layout import Codes, SidLayout

if TYPE_CHECKING:
    import pandas as pd

END_CODE = 1
"""The code of the end token in a trailing end level, whose codebook is the begin and the end token."""


class CatalogFormat(StrEnum):
    """The formats of SPEC S2. ``json``: ``"a,b,c"`` keys; ``index``: MiniOneRec; ``packed``: OpenOneRec."""

    JSON = "json"
    INDEX = "index"
    PACKED = "packed"
    TSV = "tsv"
    CSV = "csv"
    PARQUET = "parquet"


def format_of(path: Path) -> CatalogFormat:
    """The format that a file name asks for. Raises :class:`CatalogError` if it asks for none."""
    name = path.name.removesuffix(".gz")
    if name.endswith("index.json"):
        return CatalogFormat.INDEX
    if name in ("sid2pid.json", "sid2iid.json"):
        return CatalogFormat.PACKED
    suffix = Path(name).suffix.removeprefix(".")
    if suffix in ("json", "tsv", "csv", "parquet"):
        return CatalogFormat(suffix)
    raise CatalogError(f"{path}: no catalog format ends like this: pass --to {'|'.join(CatalogFormat)}")


def write_catalog(
    catalog: Catalog,
    path: Path,
    kind: CatalogFormat,
    *,
    layout: SidLayout | None = None,
    packing: Packing | None = None,
    code_columns: bool = False,
    end_level: bool = False,
) -> None:
    """Write ``catalog`` to ``path`` as ``kind``, compressed if the name ends in ``.gz``, replaced as a whole.

    Token texts come from ``layout``, without one they are ``<a_0>``. Tables hold ``code_0`` ... columns with
    ``code_columns``, else ``sid``. ``end_level`` appends a trailing end level to ``json``. JSON formats have
    no place for titles. Raises :class:`CatalogError` for what ``kind`` cannot hold.
    """
    if kind in (CatalogFormat.TSV, CatalogFormat.CSV, CatalogFormat.PARQUET):
        data = _table(catalog, path, kind, layout, code_columns=code_columns)
    elif kind is CatalogFormat.INDEX:
        data = _json(_index(catalog, path, layout))
    elif kind is CatalogFormat.PACKED:
        data = _json(_packed(catalog, path, packing or Packing(depth=catalog.depth)))
    else:
        tail = f",{END_CODE}" if end_level else ""
        data = _json({",".join(map(str, sid)) + tail: list(items) for _, sid, items in _entries(catalog)})
    _replace(path, gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def _entries(catalog: Catalog) -> Iterator[tuple[int, Codes, tuple[str, ...]]]:
    for rank, sid in enumerate(catalog.sids.tolist()):
        yield rank, tuple(sid), catalog.items_of(rank)


def _text(sid: Codes, layout: SidLayout | None) -> list[str]:
    if layout is not None:
        return [texts[code] for texts, code in zip(layout.texts, sid, strict=True)]
    return [f"<{chr(ord('a') + level)}_{code}>" for level, code in enumerate(sid)]


def _json(document: dict[str, list[str]] | dict[str, list[dict[str, int | str]]]) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _index(catalog: Catalog, path: Path, layout: SidLayout | None) -> dict[str, list[str]]:
    index: dict[str, list[str]] = {}
    for _, sid, items in _entries(catalog):
        for item in items:
            if item in index:
                raise CatalogError(f"{path}: item {item!r} has two semantic IDs, which an index cannot hold")
            index[item] = _text(sid, layout)
    return index


def _packed(catalog: Catalog, path: Path, packing: Packing) -> dict[str, list[dict[str, int | str]]]:
    if packing.depth != catalog.depth or int(catalog.sids.max()) >= packing.base:
        raise CatalogError(
            f"{path}: {catalog.depth} levels with codes up to {catalog.sids.max()} do not fit "
            f"{packing.depth} levels of {packing.base} codes: pass --base and --depth"
        )
    field = "iid" if path.name.startswith("sid2iid") else "pid"
    return {
        str(packing.pack(sid)): [{field: int(item) if _is_integer(item) else item} for item in items]
        for _, sid, items in _entries(catalog)
    }


def _is_integer(item: str) -> bool:
    return item.isascii() and item.isdigit() and len(item) < 19 and str(int(item)) == item


def _table(catalog: Catalog, path: Path, kind: CatalogFormat, layout: SidLayout | None, *, code_columns: bool) -> bytes:
    import pandas as pd

    ranks = np.repeat(np.arange(catalog.num_sids), np.diff(catalog.item_start))
    columns: dict[str, object] = {"item_id": catalog.items[:]}
    if code_columns:
        columns |= {f"code_{level}": column[ranks] for level, column in enumerate(catalog.sids.T)}
    else:
        texts = ["".join(_text(sid, layout)) for _, sid, _ in _entries(catalog)]
        columns["sid"] = [texts[rank] for rank in ranks]
    if catalog.titles is not None:
        columns["title"] = catalog.titles[:]
    frame = pd.DataFrame(columns)
    if kind is CatalogFormat.PARQUET:
        return _parquet(path, frame)
    if kind is CatalogFormat.TSV:
        _refuse_line_ends(catalog, path)
        return frame.to_csv(index=False, sep="\t", lineterminator="\n").encode()
    return frame.to_csv(index=False, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC).encode()


def _refuse_line_ends(catalog: Catalog, path: Path) -> None:
    for texts in (catalog.items, catalog.titles or ()):
        for text in texts:
            if "\n" in text or "\r" in text:
                raise CatalogError(f"{path}: {text[:60]!r} holds a line end: write CSV or Parquet instead")


def _parquet(path: Path, frame: pd.DataFrame) -> bytes:
    buffer = io.BytesIO()
    try:
        frame.to_parquet(buffer, index=False)
    except ImportError as error:
        raise CatalogError(f"{path}: writing Parquet needs pyarrow: install it") from error
    return buffer.getvalue()


def _replace(path: Path, data: bytes) -> None:
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.chmod(name, 0o644)  # mkstemp's file is readable by its owner only
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise CatalogError(f"{path}: cannot write: {error.strerror or error}") from error
