"""Reads codebooks, begin and end tokens out of a tokenizer's added tokens, and ``--sid`` out of its text."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flashrec.errors import LayoutError

_FAMILIES = (
    ("<s_a_0>", re.compile(r"<s_([a-z])_(0|[1-9][0-9]{0,8})>")),
    ("<a_0>", re.compile(r"<([a-z])_(0|[1-9][0-9]{0,8})>")),
)
_BEGIN = ("<|sid_begin|>", "<sid_begin>")
_END = ("<|sid_end|>", "<sid_end>")
_RANGE = re.compile(r"([0-9]{1,9}):([0-9]{1,9})/([0-9]{1,9}(?:,[0-9]{1,9})*)")


@dataclass(frozen=True, eq=False)
class Codebook:
    """One level: ``token_ids`` int32 ``[size]`` by code, and the tokens' texts."""

    token_ids: NDArray[np.int32]
    texts: tuple[str, ...]


@dataclass(frozen=True)
class SidRange:
    """A parsed ``--sid``: token ids ``start`` to ``end`` (included), cut into codebooks of ``sizes``."""

    text: str
    start: int
    end: int
    sizes: tuple[int, ...]

    def spans(self) -> list[NDArray[np.int32]]:
        """int32 token ids of each codebook."""
        stops = self.start + np.cumsum(self.sizes)
        return [np.arange(stop - size, stop, dtype=np.int32) for size, stop in zip(self.sizes, stops, strict=True)]

    def without_end_level(self, begin: tuple[str, int] | None, end: tuple[str, int] | None) -> SidRange:
        """The same range without a last codebook that is only the begin and end token, or the end token."""
        if end is None or len(self.sizes) < 2:
            return self
        last = self.spans()[-1].tolist()
        if last == [end[1]] or (begin is not None and last == [begin[1], end[1]]):
            return SidRange(self.text, self.start, self.end - self.sizes[-1], self.sizes[:-1])
        return self


def codebook_families(added: Mapping[str, int]) -> list[tuple[Codebook, ...]]:
    """The codebooks of every known token family in ``added`` (text -> token id).

    Raises :class:`LayoutError` if a family's levels or codes have gaps.
    """
    families: list[tuple[Codebook, ...]] = []
    for example, pattern in _FAMILIES:
        levels: dict[str, dict[int, tuple[int, str]]] = defaultdict(dict)
        for text, token in added.items():
            match = pattern.fullmatch(text)
            if match:
                levels[match[1]][int(match[2])] = (token, text)
        if levels:
            families.append(_complete(example, levels))
    return families


def _complete(example: str, levels: Mapping[str, Mapping[int, tuple[int, str]]]) -> tuple[Codebook, ...]:
    books: list[Codebook] = []
    for position, letter in enumerate(sorted(levels)):
        expected = chr(ord("a") + position)
        if letter != expected:
            raise LayoutError(f"tokenizer: codebooks like {example} jump to level {letter!r}, {expected!r} is missing")
        codes = levels[letter]
        missing = next((code for code in range(len(codes)) if code not in codes), None)
        if missing is not None:
            raise LayoutError(
                f"tokenizer: codebook {letter!r} like {example}: {len(codes)} tokens, but not code {missing}"
            )
        ordered = [codes[code] for code in range(len(codes))]
        token_ids = np.array([token for token, _ in ordered], dtype=np.int32)
        books.append(Codebook(token_ids, tuple(text for _, text in ordered)))
    return tuple(books)


def boundary_tokens(added: Mapping[str, int]) -> tuple[tuple[str, int] | None, tuple[str, int] | None]:
    """(text, token id) of the begin and of the end token, each ``None`` where ``added`` has none."""
    begin = next(((text, added[text]) for text in _BEGIN if text in added), None)
    end = next(((text, added[text]) for text in _END if text in added), None)
    return begin, end


def parse_sid_range(text: str) -> SidRange:
    """Parse ``START:END/SIZE,SIZE,...``. Raises :class:`LayoutError`."""
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        raise LayoutError(f"--sid {text!r}: expected START:END/SIZE,SIZE,..., for instance 1000:1767/256,256,256")
    start, end = int(match[1]), int(match[2])
    sizes = tuple(int(size) for size in match[3].split(","))
    if 0 in sizes:
        raise LayoutError(f"--sid {text}: a codebook of size 0")
    if sum(sizes) != end - start + 1:
        raise LayoutError(
            f"--sid {text}: tokens {start} to {end} (both included) are {end - start + 1}, "
            f"the sizes add up to {sum(sizes)}"
        )
    return SidRange(text.strip(), start, end, sizes)


def describe_codebooks(codebooks: Sequence[Codebook]) -> str:
    """The codebooks in the form of ``--sid`` where they are contiguous, else level by level."""
    ids = np.concatenate([book.token_ids for book in codebooks])
    sizes = ",".join(str(len(book.token_ids)) for book in codebooks)
    if np.array_equal(ids, np.arange(ids[0], ids[0] + len(ids))):
        return f"{ids[0]}:{ids[-1]}/{sizes}"
    levels = ", ".join(
        f"{book.texts[0]}..{book.texts[-1]} = tokens {book.token_ids.min()} to {book.token_ids.max()}"
        for book in codebooks
    )
    return f"codebooks of {sizes} ({levels})"
