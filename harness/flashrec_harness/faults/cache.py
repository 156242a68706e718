"""Faults of the page pool, the prefix cache and prefill."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from flashrec.attention.base import PrefillMeta
from flashrec.kvcache.radix import PageNode, RadixCache
from flashrec.runtime import prefill
from flashrec.runtime.member import Member
from flashrec.runtime.prefill import Segment
from flashrec_harness.faults.registry import fault


@fault("early-page-reuse", axis="cache", tensor="kv")
def early_page_reuse() -> Iterator[None]:
    """A page that the prefix cache keeps goes back to the pool as well: the next wave writes over it."""
    real = RadixCache.insert

    def insert(self: RadixCache, tokens: NDArray[np.int32], pages: Sequence[int]) -> list[int]:
        spare = real(self, tokens, pages)
        kept = [page for page in pages if page not in spare]
        free = set(self.pool._free)
        return spare + [page for page in kept[-1:] if page not in free]

    with mock.patch.object(RadixCache, "insert", insert):
        yield


@fault("eviction-ignores-readers", axis="eviction", tensor="kv")
def eviction_ignores_readers() -> Iterator[None]:
    """Eviction takes the pages that the wave being admitted reads."""
    real_evict = RadixCache.evict

    def evict(self: RadixCache, count: int) -> int:
        self._candidates.clear()
        for node in _nodes(self):
            node.last_used, node.readers, node.queued = -node.last_used, 0, False
            self._queue(node)
        return real_evict(self, count)

    def evictable(self: RadixCache) -> int:
        return self.cached_pages

    with (
        mock.patch.object(RadixCache, "evict", evict),
        mock.patch.object(RadixCache, "evictable_pages", evictable),
    ):
        yield


def _nodes(cache: RadixCache) -> list[PageNode]:
    found, stack = [], list(cache._root.children.values())
    while stack:
        node = stack.pop()
        found.append(node)
        stack.extend(node.children.values())
    return found


@fault("truncated-page-key", axis="cache", tensor="kv")
def truncated_page_key() -> Iterator[None]:
    """The prefix cache compares all tokens of a page but the last: near twins hit each other's pages."""
    real = RadixCache.page_keys

    def page_keys(self: RadixCache, tokens: NDArray[np.int32]) -> Iterator[bytes]:
        return (key[:-4] for key in real(self, tokens))

    with mock.patch.object(RadixCache, "page_keys", page_keys):
        yield


@fault("rope-off-by-one-after-hit", axis="cache", tensor="positions")
def rope_off_by_one_after_hit() -> Iterator[None]:
    """After a cache hit the rest of the prompt is rotated by one position too many."""

    def shift(member: Member, seg: Segment, positions: NDArray[np.int32]) -> None:
        positions += member.cached > 0

    with _positions_changed_by(shift):
        yield


@fault("positions-restart-in-chunk", axis="chunks", tensor="positions")
def positions_restart_in_chunk() -> Iterator[None]:
    """In every chunk of a prompt but the first, the first token is rotated as if it stood one place earlier."""

    def shift(member: Member, seg: Segment, positions: NDArray[np.int32]) -> None:
        positions[0] -= seg.start > member.cached

    with _positions_changed_by(shift):
        yield


def _positions_changed_by(
    shift: Callable[[Member, Segment, NDArray[np.int32]], None],
) -> AbstractContextManager[object]:
    """``shift`` is given every segment of a prefill pass and its positions to change, int32."""
    real = prefill.lay_out

    def lay_out(
        members: Sequence[Member], segments: Sequence[Segment], page_size: int
    ) -> tuple[NDArray[np.int32], PrefillMeta]:
        tokens, meta = real(members, segments, page_size)
        first = 0
        for seg in segments:
            last = first + seg.end - seg.start
            shift(members[seg.member], seg, tokens[1, first:last])
            first = last
        return tokens, meta

    return mock.patch.object(prefill, "lay_out", lay_out)
