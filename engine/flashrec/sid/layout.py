"""Where the semantic-ID tokens of a checkpoint stand in its vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flashrec.errors import LayoutError
from flashrec.sid.vocabulary import (
    Codebook,
    SidRange,
    boundary_tokens,
    codebook_families,
    describe_codebooks,
    parse_sid_range,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

Codes = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class SidLayout:
    """Token ids and texts of every codebook, and of the tokens that wrap a semantic ID.

    ``codebooks[level]`` is int32 ``[size]``: the token id of each 0-based code. The ids may stand anywhere in
    the vocabulary, in any order. ``texts[level][code]`` is that token as text. ``begin`` and ``end`` are
    ``None`` where the tokenizer has no such token; their texts are then empty.
    """

    codebooks: tuple[NDArray[np.int32], ...]
    texts: tuple[tuple[str, ...], ...]
    begin: int | None = None
    end: int | None = None
    begin_text: str = ""
    end_text: str = ""

    def __post_init__(self) -> None:
        if not self.codebooks:
            raise LayoutError("layout: no codebook: a semantic ID needs at least one level")
        for level, (tokens, texts) in enumerate(zip(self.codebooks, self.texts, strict=True)):
            if len(tokens) == 0 or len(tokens) != len(texts):
                raise LayoutError(f"layout: level {level} has {len(tokens)} token ids and {len(texts)} texts")
            if len(np.unique(tokens)) != len(tokens):
                raise LayoutError(f"layout: level {level} names one token id for two codes")
        for name, token in (("begin", self.begin), ("end", self.end)):
            if token is not None and token in self.sid_tokens:
                raise LayoutError(f"layout: the {name} token {token} lies inside a codebook")

    @property
    def depth(self) -> int:
        """Number of levels, without begin and end tokens."""
        return len(self.codebooks)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of codes per level."""
        return tuple(len(tokens) for tokens in self.codebooks)

    @cached_property
    def sid_tokens(self) -> NDArray[np.int32]:
        """int32, sorted, distinct: the token ids of all codebooks (no begin or end token)."""
        return np.unique(np.concatenate(self.codebooks)).astype(np.int32)

    @cached_property
    def tokens_in_a_row(self) -> NDArray[np.int32]:
        """int32: the codebooks, one behind the other."""
        return np.concatenate(self.codebooks)

    @cached_property
    def firsts(self) -> NDArray[np.int32]:
        """int32 ``[depth]``: where each level begins in :attr:`tokens_in_a_row`."""
        return np.cumsum((0, *self.sizes[:-1]), dtype=np.int32)

    @cached_property
    def _code_of_token(self) -> tuple[Mapping[int, int], ...]:
        return tuple({int(token): code for code, token in enumerate(tokens)} for tokens in self.codebooks)

    @cached_property
    def _code_of_text(self) -> tuple[Mapping[str, int], ...]:
        return tuple({text: code for code, text in enumerate(texts)} for texts in self.texts)

    @cached_property
    def _text_lengths(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(sorted({len(text) for text in texts}, reverse=True)) for texts in self.texts)

    def check(self, sid: Sequence[int]) -> None:
        """Raise :class:`LayoutError` naming the level and the code if ``sid`` is not one of this layout's."""
        if len(sid) != self.depth:
            raise LayoutError(f"semantic ID {tuple(sid)} has {len(sid)} codes, the layout has {self.depth} levels")
        for level, (code, size) in enumerate(zip(sid, self.sizes, strict=True)):
            if not 0 <= code < size:
                raise LayoutError(f"semantic ID {tuple(sid)}: level {level} has codes 0 to {size - 1}, not {code}")

    def token_ids(self, sid: Sequence[int]) -> tuple[int, ...]:
        """Token ids of the codes ``sid``, without begin and end token. Raises :class:`LayoutError`."""
        self.check(sid)
        return tuple(int(tokens[code]) for tokens, code in zip(self.codebooks, sid, strict=True))

    def codes(self, token_ids: Sequence[int]) -> Codes | None:
        """Codes of ``token_ids``, with or without begin and end token; ``None`` if they are no SID."""
        tokens = list(token_ids)
        if tokens and self.begin is not None and tokens[0] == self.begin:
            tokens = tokens[1:]
        if tokens and self.end is not None and tokens[-1] == self.end:
            tokens = tokens[:-1]
        if len(tokens) != self.depth:
            return None
        codes = [table.get(token, -1) for table, token in zip(self._code_of_token, tokens, strict=True)]
        return None if -1 in codes else tuple(codes)

    def text(self, sid: Sequence[int]) -> str:
        """The joined token texts, for instance ``<s_a_1><s_b_2><s_c_3>``. Raises :class:`LayoutError`."""
        self.check(sid)
        return "".join(texts[code] for texts, code in zip(self.texts, sid, strict=True))

    def parse(self, text: str) -> Codes:
        """Codes of a joined text, with or without begin and end token. Raises :class:`LayoutError`."""
        rest = text.strip()
        if self.begin_text:
            rest = rest.removeprefix(self.begin_text)
        if self.end_text:
            rest = rest.removesuffix(self.end_text)
        codes: list[int] = []
        for level, (table, lengths) in enumerate(zip(self._code_of_text, self._text_lengths, strict=True)):
            length = next((length for length in lengths if rest[:length] in table), None)
            if length is None:
                raise LayoutError(f"{text[:80]!r} has no token of level {level} at {rest[:20]!r}")
            codes.append(table[rest[:length]])
            rest = rest[length:]
        if rest:
            raise LayoutError(f"{text[:80]!r} goes on after its {self.depth} levels with {rest[:20]!r}")
        return tuple(codes)


def infer_layout(tokenizer: Any, *, depth: int | None = None, override: str | None = None) -> SidLayout:
    """The layout that a ``transformers`` fast tokenizer's added tokens define (SPEC S1).

    ``depth`` is the catalog's number of levels, if there is a catalog: a tokenizer with more codebooks is cut
    to it, and one level more than there are codebooks is a trailing end level, outside the layout.
    ``override`` is ``START:END/SIZE,SIZE,...``: both ends are included and the codebooks follow each other
    from ``START``; a trailing end level (size 2 over the begin and end token, or size 1 over the end token)
    may stand behind them. Raises :class:`LayoutError`.
    """
    added: dict[str, int] = tokenizer.get_added_vocab()
    families = codebook_families(added)
    begin, end = boundary_tokens(added)
    if override is not None:
        asked = parse_sid_range(override).without_end_level(begin, end)
        codebooks = _overridden(tokenizer, asked, families)
    elif not families:
        raise LayoutError(
            "tokenizer: no codebook among its added tokens (neither <s_a_0> nor <a_0>): "
            "pass --sid START:END/SIZE,... to name them"
        )
    elif len(families) > 1:
        found = " and ".join(f"{describe_codebooks(family)}" for family in families)
        raise LayoutError(f"tokenizer: two families of codebooks, {found}: pass --sid to choose one")
    else:
        codebooks = families[0]
    codebooks = _cut(codebooks, depth, has_end=end is not None, exact=override is not None)
    return SidLayout(
        codebooks=tuple(book.token_ids for book in codebooks),
        texts=tuple(book.texts for book in codebooks),
        begin=None if begin is None else begin[1],
        end=None if end is None else end[1],
        begin_text="" if begin is None else begin[0],
        end_text="" if end is None else end[0],
    )


def _cut(codebooks: Sequence[Codebook], depth: int | None, *, has_end: bool, exact: bool) -> Sequence[Codebook]:
    """The codebooks that a catalog of ``depth`` levels uses."""
    levels = len(codebooks)
    if depth is None or depth == levels or (depth == levels + 1 and has_end):
        return codebooks
    if depth > levels or exact:
        source = "--sid names" if exact else "the tokenizer has"
        raise LayoutError(f"catalog: {depth} levels, but {source} {levels} codebooks: {describe_codebooks(codebooks)}")
    return codebooks[:depth]


def _overridden(tokenizer: Any, asked: SidRange, families: Sequence[Sequence[Codebook]]) -> Sequence[Codebook]:
    """The codebooks that ``--sid`` names, after checking them against the tokenizer's own."""
    if asked.end >= len(tokenizer):
        raise LayoutError(f"--sid {asked.text}: token {asked.end} is beyond the tokenizer's {len(tokenizer)} tokens")
    spans = asked.spans()
    for family in families:
        same = len(spans) <= len(family) and all(
            np.array_equal(book.token_ids, span) for book, span in zip(family, spans, strict=False)
        )
        if same:
            return family[: len(spans)]
    if families:
        found = " or ".join(describe_codebooks(family) for family in families)
        raise LayoutError(f"--sid {asked.text} contradicts the tokenizer, whose added tokens say {found}")
    return [_named(tokenizer, asked, span) for span in spans]


def _named(tokenizer: Any, asked: SidRange, span: NDArray[np.int32]) -> Codebook:
    texts = tokenizer.convert_ids_to_tokens(span.tolist())
    for token, text in zip(span.tolist(), texts, strict=True):
        if not text:
            raise LayoutError(f"--sid {asked.text}: the tokenizer has no token {token}")
    return Codebook(span, tuple(texts))
