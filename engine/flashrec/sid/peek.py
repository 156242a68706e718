"""The depth of a catalog from its first entry, before a layout is known."""

from __future__ import annotations

import json
import re
from pathlib import Path

from flashrec.sid.codes import Packing
from flashrec.sid.formats import Pairs, json_format, load_pairs, read_pairs
from flashrec.sid.source import PARQUET_MAGIC, is_json, read_bytes
from flashrec.sid.tables import table_depth

_HEAD = 1 << 20
_FIRST_KEY = re.compile(r'\s*\{\s*(?=")')
_COLON = re.compile(r"\s*:\s*")


def peek_depth(path: Path | str, *, packing: Packing | None = None) -> int:
    """Levels of the SIDs in a catalog file, a trailing end level included.

    Reads the first entry only, save where single integers as keys may be packed SIDs or codes of one level.
    Raises :class:`CatalogError`.
    """
    path = Path(path)
    head = read_bytes(path, _HEAD)
    if not is_json(head):
        return table_depth(path, read_bytes(path) if head[:4] == PARQUET_MAGIC else head, packing)
    first = None if packing is not None else _first_pair(head)
    if first is None or ("," not in first[0] and json_format([first]) != "index"):
        pairs = load_pairs(path, read_bytes(path))
        packing = Packing() if packing is None and json_format(pairs) == "packed" else packing
        first = pairs[0]
    return int(read_pairs(path, Pairs([first]), None, packing).codes.shape[1])


def _first_pair(head: bytes) -> tuple[str, object] | None:
    """The first entry of a JSON object, ``None`` where ``head`` does not hold a whole one."""
    text = head.decode(errors="ignore")
    start = _FIRST_KEY.match(text)
    decoder = json.JSONDecoder(object_pairs_hook=Pairs)
    try:
        if start is None:
            return None
        key, position = decoder.raw_decode(text, start.end())
        colon = _COLON.match(text, position)
        if colon is None:
            return None
        return key, decoder.raw_decode(text, colon.end())[0]
    except (ValueError, RecursionError):
        return None
