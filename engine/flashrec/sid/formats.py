"""Recognises and reads a JSON catalog (SPEC S2); :mod:`flashrec.sid.tables` reads the tabular ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeGuard

import numpy as np
from numpy.typing import NDArray

from flashrec.errors import CatalogError
from flashrec.sid.bulk import BLOCK, block_of, codes_of_texts
from flashrec.sid.codes import RECIF_BASE, NotationError, Packing, looks_joined, parse_joined, parse_sid
from flashrec.sid.layout import Codes, SidLayout
from flashrec.sid.rows import RowBuilder, Rows
from flashrec.sid.source import bad_row, decode

JsonFormat = Literal["codes", "index", "packed"]
_ITEM_FIELDS = ("pid", "iid", "item_id")


class Pairs(list[tuple[str, object]]):
    """A JSON object with its keys in order and its duplicate keys kept, which a dict would lose."""


def load_pairs(path: Path, data: bytes) -> Pairs:
    """The entries of a JSON object. Raises :class:`CatalogError` for anything else."""
    try:
        document = json.loads(decode(path, data), object_pairs_hook=Pairs)
    except RecursionError as error:
        raise CatalogError(f"{path}: the JSON is nested too deeply for a catalog") from error
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}"
        raise CatalogError(f"{path}: {place}: not JSON: {error.msg}") from error
    except ValueError as error:
        raise CatalogError(f"{path}: not a JSON catalog: {error}") from error
    if not isinstance(document, Pairs):
        raise CatalogError(f"{path}: a catalog is a JSON object, not a {_kind(document)}")
    if not document:
        raise CatalogError(f"{path}: the catalog is empty")
    return document


def json_format(pairs: Sequence[tuple[str, object]]) -> JsonFormat:
    """Which of the three JSON formats the entries are in.

    ``index``: the values are lists of token texts. ``packed``: the keys are single integers, and either the
    values are OpenOneRec's ``{"pid": ...}`` records or a key is larger than any codebook. Else ``codes``.
    """
    key, value = pairs[0]
    if looks_joined(value):
        return "index"
    if "," in key:
        return "codes"
    if _is_array(value) and any(isinstance(entry, Pairs) for entry in value):
        return "packed"
    integers = (int(key) for key, _ in pairs if key.isascii() and key.isdigit() and len(key) < 19)
    return "packed" if max(integers, default=0) >= RECIF_BASE else "codes"


def read_json(path: Path, data: bytes, layout: SidLayout | None, packing: Packing | None) -> Rows:
    """Read any of the three formats; ``packing`` forces packed integers. Raises :class:`CatalogError`."""
    return read_pairs(path, load_pairs(path, data), layout, packing)


def read_pairs(path: Path, pairs: Pairs, layout: SidLayout | None, packing: Packing | None) -> Rows:
    """:func:`read_json` of the entries of an object."""
    kind = "packed" if packing is not None else json_format(pairs)
    if kind == "index":
        return _read_index(path, pairs, layout)
    if kind == "codes":
        return _read_map(path, pairs, lambda key: parse_sid(key, layout), codes_of_texts)
    default = Packing() if layout is None else Packing(depth=layout.depth)
    return _read_map(path, pairs, (packing or default).unpack, None)


def _read_map(
    path: Path,
    pairs: Pairs,
    parse: Callable[[str], Codes],
    parse_all: Callable[[list[str]], NDArray[np.int32] | None] | None,
) -> Rows:
    """``parse_all`` does to a block of keys what ``parse`` does to one; it may give up with ``None``."""
    rows = RowBuilder(path)
    for first in range(0, len(pairs), BLOCK):
        part = pairs[first : first + BLOCK]
        codes = None if parse_all is None else parse_all([key for key, _ in part])
        block = block_of(codes, [value for _, value in part])
        if rows.add_block(first + 1, block):
            continue
        for number, (key, value) in enumerate(part, start=first + 1):
            try:
                sid, items = parse(key), _items(value)
            except NotationError as error:
                raise bad_row(path, number, str(error)) from error
            for item in items:
                rows.add(number, sid, item)
    return rows.finish()


def _read_index(path: Path, pairs: Pairs, layout: SidLayout | None) -> Rows:
    rows = RowBuilder(path)
    for number, (item, tokens) in enumerate(pairs, start=1):
        try:
            if not looks_joined(tokens):
                raise NotationError(f"a list of token texts is needed, not a {_kind(tokens)}")
            sid = parse_joined("".join(tokens), layout)
        except NotationError as error:
            raise bad_row(path, number, f"item {item[:60]!r}: {error}") from error
        rows.add(number, sid, item)
    return rows.finish()


def _items(value: object) -> list[str]:
    entries = value if _is_array(value) else [value]
    if not entries:
        raise NotationError("the semantic ID names no item")
    return [_item(entry) for entry in entries]


def _item(entry: object) -> str:
    if isinstance(entry, Pairs):
        fields = dict(entry)
        name = next((name for name in _ITEM_FIELDS if name in fields), None)
        if name is None:
            raise NotationError(f"an item record needs one of {', '.join(_ITEM_FIELDS)}")
        entry = fields[name]
    if isinstance(entry, str):
        return entry
    if isinstance(entry, int) and not isinstance(entry, bool):
        return str(entry)
    raise NotationError(f"an item id is a string or an integer, not a {_kind(entry)}")


def _is_array(value: object) -> TypeGuard[list[object]]:
    return isinstance(value, list) and not isinstance(value, Pairs)


def _kind(value: object) -> str:
    if isinstance(value, Pairs):
        return "JSON object"
    return "JSON null" if value is None else f"JSON {type(value).__name__}"
