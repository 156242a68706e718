"""The catalog on the device, one :class:`Level` per emitted token, and the head rows that each level needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from flashrec.errors import LayoutError
from flashrec.request import ScoreSpace
from flashrec.sid.layout import SidLayout
from flashrec.sid.trie import Trie


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """What step number ``index`` of the search needs.

    ``weight`` [W, H] are the head's rows that give this step's logits; ``columns`` int32 [size] is the
    column of each code in them; ``tokens`` int32 [size] its token id and ``order`` int32 [size] the rank of
    that id among the level's, which breaks ties. ``normalise_legal``: the softmax runs over the legal codes
    only (score space ``children``), else over all W columns.

    The trie: either ``child_start`` int32 [nodes + 1] and ``child_code`` int16/int32 [edges] (CSR), or
    ``table`` int32 [nodes, size] with -1 for an illegal code. ``leaf_start`` int32 [children + 1] gives the
    SIDs under each *child*; ``None`` means that a child is a SID.
    """

    index: int
    weight: torch.Tensor
    columns: torch.Tensor
    tokens: torch.Tensor
    order: torch.Tensor
    normalise_legal: bool
    max_children: int
    child_start: torch.Tensor | None
    child_code: torch.Tensor | None
    table: torch.Tensor | None
    leaf_start: torch.Tensor | None

    @property
    def size(self) -> int:
        return self.columns.shape[0]

    @property
    def settled(self) -> bool:
        """Whether every prefix goes on in one way, whose log-probability is 0 whatever the logits (SPEC B6)."""
        return self.normalise_legal and self.max_children == 1

    def legal(self, node: torch.Tensor) -> torch.Tensor:
        """Child nodes of ``node`` int32 [N] by code: int32 [N, size], -1 where the trie has none."""
        if self.table is not None:
            return self.table[node]
        assert self.child_start is not None
        assert self.child_code is not None
        start = self.child_start[node].unsqueeze(1)
        end = self.child_start[node + 1].unsqueeze(1)
        edge = start + torch.arange(self.max_children, dtype=torch.int32, device=node.device)
        beyond = edge >= end
        edge = torch.where(beyond, start.clamp(max=self.child_code.shape[0] - 1), edge)
        code = self.child_code[edge].long()
        # Surplus edges write to one column past the codes, which is cut off.
        code = torch.where(beyond, self.size, code)
        out = torch.full((node.shape[0], self.size + 1), -1, dtype=torch.int32, device=node.device)
        return out.scatter_(1, code, edge)[:, : self.size]


class HeadLevel(NamedTuple):
    """What a step needs of the head in one score space, whatever the catalog: fields of :class:`Level`."""

    weight: torch.Tensor
    columns: torch.Tensor
    tokens: torch.Tensor
    order: torch.Tensor
    normalise_legal: bool


class TrieLevel(NamedTuple):
    """What a step needs of a catalog, whatever the score space: fields of :class:`Level`."""

    child_start: torch.Tensor | None
    child_code: torch.Tensor | None
    table: torch.Tensor | None
    leaf_start: torch.Tensor | None
    max_children: int


def build_levels(heads: Sequence[HeadLevel], tries: Sequence[TrieLevel]) -> list[Level]:
    """The steps of a search in one score space over one catalog, both made with the same ``score_end``."""
    return [
        Level(index=index, **head._asdict(), **links._asdict())
        for index, (head, links) in enumerate(zip(heads, tries, strict=True))
    ]


def head_levels(layout: SidLayout, head: torch.Tensor, space: ScoreSpace, *, score_end: bool) -> list[HeadLevel]:
    """The rows of ``head`` [vocabulary, H] that each step looks at; with ``score_end`` the end token is one more step.

    Raises:
        LayoutError: a token stands in two codebooks, so that a softmax over SID tokens is not defined.
    """
    books = list(layout.codebooks)
    if score_end:
        if layout.end is None:
            raise LayoutError("score_end: the tokenizer has no end token to score")
        books.append(np.array([layout.end], dtype=np.int32))
    every = np.concatenate(books)
    if len(np.unique(every)) != len(every):
        raise LayoutError("a token id stands in two codebooks: the levels of a SID need distinct tokens")
    offsets = np.cumsum([0, *(len(book) for book in books)])
    sid_rows = _rows(head, every) if space is not ScoreSpace.VOCAB else head
    levels = []
    for index, book in enumerate(books):
        if space is ScoreSpace.VOCAB:
            weight, columns = head, book.astype(np.int64)
        elif space is ScoreSpace.SID:
            weight, columns = sid_rows, np.arange(offsets[index], offsets[index + 1])
        else:
            weight, columns = sid_rows[offsets[index] : offsets[index + 1]], np.arange(len(book))
        levels.append(
            HeadLevel(
                weight=weight,
                columns=_tensor(columns, head.device),
                tokens=_tensor(book, head.device),
                order=_tensor(np.argsort(np.argsort(book)), head.device),
                normalise_legal=space is ScoreSpace.CHILDREN,
            )
        )
    return levels


def trie_levels(trie: Trie, device: torch.device, *, score_end: bool, dense_cells: int) -> list[TrieLevel]:
    """Put a catalog on ``device``: dense tables while they fit ``dense_cells``, CSR below; a scored end is a level."""
    arrays = [_trie_level(trie, level, dense) for level, dense in enumerate(trie.dense_levels(dense_cells))]
    most = list(trie.max_children)
    if score_end:
        arrays.append(_end_level(trie))
        most.append(1)
    return [
        TrieLevel(
            **{name: None if array is None else _tensor(array, device) for name, array in links.items()},
            max_children=max_children,
        )
        for links, max_children in zip(arrays, most, strict=True)
    ]


def device_bytes(trie: Trie, *, score_end: bool, dense_cells: int) -> int:
    """Bytes that :func:`trie_levels` takes, at most."""
    end = sum(array.nbytes for array in _end_level(trie).values() if array is not None) if score_end else 0
    return trie.device_bytes(dense_cells) + end


Links = dict[str, NDArray[np.generic] | None]


def _trie_level(trie: Trie, level: int, dense: bool) -> Links:
    leaf_start = trie.leaf_start[level + 1] if level + 1 < trie.depth else None
    if dense:
        return {"child_start": None, "child_code": None, "table": trie.dense(level), "leaf_start": leaf_start}
    return {
        "child_start": trie.child_start[level],
        "child_code": trie.child_code[level],
        "table": None,
        "leaf_start": leaf_start,
    }


def _end_level(trie: Trie) -> Links:
    """Every SID has the end token as its only child, which keeps the SID's number."""
    return {
        "child_start": np.arange(trie.num_leaves + 1, dtype=np.int32),
        "child_code": np.zeros(trie.num_leaves, dtype=np.int16),
        "table": None,
        "leaf_start": None,
    }


def _rows(head: torch.Tensor, tokens: NDArray[np.int32]) -> torch.Tensor:
    """Head rows of ``tokens``, a view where they are one run."""
    first = int(tokens[0])
    if np.array_equal(tokens, np.arange(first, first + len(tokens))):
        return head[first : first + len(tokens)]
    return head.index_select(0, torch.from_numpy(tokens.astype(np.int64)).to(head.device))


def _tensor(array: NDArray[np.generic] | Sequence[int], device: torch.device) -> torch.Tensor:
    array = np.asarray(array)
    if array.dtype not in (np.int16, np.int32):
        array = array.astype(np.int32)
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
