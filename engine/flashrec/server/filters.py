"""From a client's ``exclude`` and ``allow`` lists to semantic IDs and item ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from flashrec.errors import LayoutError, RequestError
from flashrec.server.text import TextCodec

SidCodes = tuple[int, ...]
Entries = Sequence[str | int | list[int]]
"""Item ids (a number stands for its digits), texts of semantic IDs, or their codes."""


class FilterFields(TypedDict):
    """The filters of a :class:`~flashrec.request.Request`."""

    exclude_sids: tuple[SidCodes, ...]
    exclude_items: tuple[str, ...]
    allow_sids: tuple[SidCodes, ...] | None
    allow_items: tuple[str, ...] | None


def filter_fields(exclude: Entries, allow: Entries | None, codec: TextCodec, prefix: str = "") -> FilterFields:
    """A request's filters. Raises :class:`RequestError` on ``<prefix>exclude[i]`` or ``<prefix>allow[i]``."""
    exclude_sids, exclude_items = resolve(f"{prefix}exclude", exclude, codec)
    allow_sids, allow_items = (None, None) if allow is None else resolve(f"{prefix}allow", allow, codec)
    return FilterFields(
        exclude_sids=exclude_sids, exclude_items=exclude_items, allow_sids=allow_sids, allow_items=allow_items
    )


def filter_names(prefix: str = "") -> dict[str, str]:
    """The client's names of the fields of :class:`FilterFields`, and of both fields of a kind together."""
    kinds = {field: field.partition("_")[0] for field in FilterFields.__annotations__}
    return {field: prefix + kind for field, kind in (kinds | {kind: kind for kind in kinds.values()}).items()}


def resolve(field: str, entries: Entries, codec: TextCodec) -> tuple[tuple[SidCodes, ...], tuple[str, ...]]:
    """Split entries into semantic IDs and item ids; a text that reads as a SID is one, anything else an item.

    Raises:
        RequestError: ``field[i]``: codes that the layout does not have, or codes without a layout.
    """
    sids: list[SidCodes] = []
    items: list[str] = []
    for index, entry in enumerate(entries):
        if isinstance(entry, list):
            sids.append(_codes(f"{field}[{index}]", entry, codec))
        else:
            parsed = codec.parse_sid(entry) if isinstance(entry, str) else None
            if parsed is None:
                items.append(str(entry))
            else:
                sids.append(parsed)
    return tuple(sids), tuple(items)


def _codes(field: str, codes: list[int], codec: TextCodec) -> SidCodes:
    if codec.layout is None:
        raise RequestError(field, "this checkpoint has no semantic-ID layout")
    try:
        codec.layout.check(codes)
    except LayoutError as error:
        raise RequestError(field, str(error)) from None
    return tuple(codes)
