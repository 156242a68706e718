"""A catalog as plain sets of prefixes: what may follow what, and over what a step is normalised.

Written from SPEC B1, B3, B6 and B7 alone, apart from the engine's trie, which it judges.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flashrec.request import ScoreSpace
from flashrec_harness.references.types import Tokens

Codes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SidVocabulary:
    """Token id of each code per level, and the tokens that wrap a semantic ID (``None`` where it has none)."""

    codebooks: tuple[Tokens, ...]
    begin: int | None
    end: int | None

    def token_ids(self, codes: Codes) -> Tokens:
        return tuple(self.codebooks[level][code] for level, code in enumerate(codes))

    def all_tokens(self) -> Tokens:
        return tuple(sorted({token for codebook in self.codebooks for token in codebook}))


class Grammar:
    """The semantic IDs that a request may return.

    ``sids`` are 0-based codes; duplicates (items that share one) count once. ``exclude`` and ``allow``
    are semantic IDs too, and a prefix is legal only while one that is allowed and not excluded starts
    with it.
    """

    def __init__(
        self,
        sids: Iterable[Codes],
        vocabulary: SidVocabulary,
        *,
        exclude: Sequence[Codes] = (),
        allow: Sequence[Codes] | None = None,
        score_end: bool = False,
    ) -> None:
        legal = set(sids) if allow is None else set(sids) & set(allow)
        self.legal = frozenset(legal - set(exclude))
        self.vocabulary = vocabulary
        self.depth = len(vocabulary.codebooks)
        self.end = vocabulary.end
        self.scored_end = vocabulary.end if score_end else None
        self._children: dict[Tokens, set[int]] = {}
        for codes in self.legal:
            tokens = vocabulary.token_ids(codes)
            for level, token in enumerate(tokens):
                self._children.setdefault(tokens[:level], set()).add(token)
            if self.scored_end is not None:
                self._children[tokens] = {self.scored_end}

    @property
    def steps(self) -> int:
        """How many tokens the search selects: the levels, and the end token where it is scored."""
        return self.depth + (self.scored_end is not None)

    def children(self, prefix: Tokens) -> NDArray[np.int64]:
        """Legal next tokens after ``prefix``, ascending; empty where nothing may follow."""
        return np.array(sorted(self._children.get(prefix, ())), dtype=np.int64)

    def normaliser(self, space: ScoreSpace, prefix: Tokens) -> NDArray[np.int64] | None:
        """The tokens that the softmax after ``prefix`` runs over (B3); ``None``: the whole vocabulary."""
        level = len(prefix)
        if space is ScoreSpace.CHILDREN:
            return self.children(prefix)
        if space is ScoreSpace.VOCAB:
            return None
        at_end = level == self.depth
        if space is ScoreSpace.LEVEL:
            tokens = (self.scored_end,) if at_end else self.vocabulary.codebooks[level]
        else:
            tokens = (*self.vocabulary.all_tokens(), *(() if self.scored_end is None else (self.scored_end,)))
        return np.array(sorted(token for token in tokens if token is not None), dtype=np.int64)
