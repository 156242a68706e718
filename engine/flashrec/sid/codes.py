"""The notations of a semantic ID in a catalog: ``12,3,4``, ``<a_12><b_3><c_4>`` and a packed integer."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeGuard

from flashrec.errors import ConfigError, LayoutError
from flashrec.sid.layout import Codes, SidLayout

RECIF_BASE = 8192
"""Codes per level in OpenOneRec's packed integers."""
RECIF_DEPTH = 3
"""Levels in OpenOneRec's packed integers."""

_COMMAS = re.compile(r"\s*[0-9]{1,9}\s*(?:,\s*[0-9]{1,9}\s*)*")
_PACKED = re.compile(r"\s*[0-9]{1,18}\s*")
_JOINED = re.compile(r"(?:<(?:s_)?[a-z]_[0-9]{1,9}>)+")
_TOKEN = re.compile(r"<(?:s_)?([a-z])_([0-9]+)>")
_BEGIN = re.compile(r"^<\|?sid_begin\|?>")
_END = re.compile(r"<\|?sid_end\|?>$")


class NotationError(ValueError):
    """A cell does not hold a semantic ID. The message is the reason; the reader adds file and row."""


@dataclass(frozen=True)
class Packing:
    """How OpenOneRec packs codes into one integer: ``((a * base) + b) * base + c`` for a depth of 3."""

    base: int = RECIF_BASE
    depth: int = RECIF_DEPTH

    @classmethod
    def parse(cls, text: str) -> Packing:
        """``"8192,3"``. Raises :class:`ConfigError`."""
        base, comma, depth = text.partition(",")
        if not (comma and base.isdecimal() and depth.isdecimal() and int(base) >= 2 and 1 <= int(depth) <= 16):
            raise ConfigError(f"sid_packed: {text!r} is not BASE,DEPTH, such as 8192,3 (from 2,1 to any base,16)")
        return cls(int(base), int(depth))

    def pack(self, sid: Codes) -> int:
        """The inverse of :meth:`unpack`."""
        packed = 0
        for code in sid:
            packed = packed * self.base + code
        return packed

    def unpack(self, text: str) -> Codes:
        """Raises :class:`NotationError`."""
        if not _PACKED.fullmatch(text):
            raise NotationError(f"{text[:60]!r} is not a packed semantic ID (a non-negative integer)")
        rest = int(text)
        if rest >= self.base**self.depth:
            raise NotationError(f"{rest} is beyond {self.depth} levels of {self.base} codes")
        codes: list[int] = []
        for _ in range(self.depth):
            rest, code = divmod(rest, self.base)
            codes.append(code)
        return tuple(reversed(codes))


def parse_commas(text: str) -> Codes:
    """``"12,3,4"`` -> ``(12, 3, 4)``. Raises :class:`NotationError`."""
    if not _COMMAS.fullmatch(text):
        raise NotationError(f"{text[:60]!r} is not a list of codes like '12,3,4'")
    return tuple(map(int, text.split(",")))


def is_plain(text: str) -> bool:
    """Whether ``text`` is written as ``12,3,4`` or ``<a_12><b_3><c_4>``, which need no layout and no packing."""
    return _COMMAS.fullmatch(text) is not None or _JOINED.fullmatch(_bare(text)) is not None


def _bare(text: str) -> str:
    return _END.sub("", _BEGIN.sub("", text.strip()))


def parse_joined(text: str, layout: SidLayout | None) -> Codes:
    """``"<a_12><b_3><c_4>"`` -> ``(12, 3, 4)``, with or without begin and end token.

    The two known families name levels and codes themselves; any other needs ``layout``'s token texts.
    Raises :class:`NotationError`.
    """
    bare = _bare(text)
    if not _JOINED.fullmatch(bare):
        if layout is None:
            raise NotationError(f"{text[:60]!r} is not a semantic ID like '<a_12><b_3><c_4>'")
        try:
            return layout.parse(text)
        except LayoutError as error:
            raise NotationError(str(error)) from error
    tokens = _TOKEN.findall(bare)
    for level, (letter, _) in enumerate(tokens):
        expected = chr(ord("a") + level)
        if letter != expected:
            raise NotationError(f"{text[:60]!r} has level {letter!r} where {expected!r} belongs")
    return tuple(int(code) for _, code in tokens)


def parse_sid(text: str, layout: SidLayout | None) -> Codes:
    """Codes of ``12,3,4`` or of joined tokens. Raises :class:`NotationError`."""
    if not text.strip():
        raise NotationError("the semantic ID is empty")
    return parse_joined(text, layout) if text.lstrip()[0] == "<" else parse_commas(text)


def looks_joined(value: object) -> TypeGuard[list[str]]:
    """Whether ``value`` is a list of token texts, as in MiniOneRec's ``.index.json``."""
    return isinstance(value, list) and len(value) > 0 and all(map(_is_token_text, value))


def _is_token_text(value: object) -> bool:
    return isinstance(value, str) and value.startswith("<") and value.endswith(">")
