"""What every reference answers: a search case, and the hypotheses it ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from flashrec.request import ScoreSpace, Semantics

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """Emitted tokens, the sum of their log-probabilities, and that sum over ``length ** length_penalty``."""

    token_ids: Tokens
    cumulative: float
    score: float


RankedList = tuple[Hypothesis, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchCase:
    """One search at temperature 0, in terms that every engine here understands.

    ``prompt`` holds everything that the search starts from, the begin token of a catalog search included;
    ``implicit_begin`` sends it to the judged engine without that token, which it must then append.
    ``stop_token_ids`` is the whole stop set, empty for none. With a ``catalog`` (a key, not a path) the
    search runs over its levels and ``max_tokens`` and the stop set are not used.
    """

    name: str
    prompt: Tokens
    n: int
    beam_width: int
    max_tokens: int
    space: ScoreSpace = ScoreSpace.VOCAB
    semantics: Semantics = "transformers"
    stop_token_ids: Tokens = ()
    length_penalty: float = 1.0
    catalog: str | None = None
    implicit_begin: bool = False
    score_end: bool = False
    exclude: tuple[Tokens, ...] = ()
    allow: tuple[Tokens, ...] | None = None

    @property
    def search_key(self) -> tuple[object, ...]:
        """Equal for two cases that have the same answer; the rules for stop tokens count only where there are any."""
        return (
            *(self.prompt, self.n, self.beam_width, self.max_tokens, self.space),
            *((self.semantics, self.stop_token_ids) if self.stop_token_ids else (None, ())),
            *(self.length_penalty, self.catalog, self.score_end),
            *(self.exclude, self.allow),
        )


class Searcher(Protocol):
    """Anything that answers search cases: the judged engine, or a reference."""

    name: str

    def search(self, cases: Sequence[SearchCase]) -> list[RankedList]:
        """One ranked list per case, in order."""
        ...


def length_score(cumulative: float, length: int, length_penalty: float) -> float:
    """SPEC B1: the sum over ``length ** length_penalty``."""
    return float(cumulative / length**length_penalty)
