"""The prefix cache: a radix tree over whole pages of prompt tokens.

A node is one page. Its key is the page's tokens, so a path from the root spells a prompt; its ``tag`` is a
hash of that path, which names the page's content wherever it lies physically.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flashrec.kvcache.pool import KVPool

_KEY_DTYPE = np.dtype("<i4")


def page_tag(parent_tag: int, tokens: bytes) -> int:
    """63-bit content hash of a page given its predecessor's; the same in every process."""
    digest = hashlib.blake2b(parent_tag.to_bytes(8, "little") + tokens, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(slots=True, eq=False)
class PageNode:
    """One cached page. ``readers`` counts the waves that read it now; only unread leaves are evicted.

    ``queued``: it has an entry among the candidates for eviction, maybe an outdated one.
    """

    key: bytes
    page: int
    parent: PageNode | None
    children: dict[bytes, PageNode] = field(default_factory=dict)
    readers: int = 0
    last_used: int = 0
    queued: bool = False

    @property
    def tag(self) -> int:
        """Content hash of the path from the root; only a ledger asks for it."""
        path: list[PageNode] = []
        node = self
        while node.parent is not None:
            path.append(node)
            node = node.parent
        tag = 0
        for node in reversed(path):
            tag = page_tag(tag, node.key)
        return tag


@dataclass(slots=True)
class CacheStats:
    """Counters since the start, in tokens, and evictions in pages."""

    hit_tokens: int = 0
    missed_tokens: int = 0
    evicted_pages: int = 0


class RadixCache:
    """Maps prompt prefixes to pages of a pool, and evicts the least recently used when pages run out.

    A disabled cache never matches and keeps nothing.
    """

    def __init__(self, pool: KVPool, *, enabled: bool = True) -> None:
        self.pool = pool
        self.enabled = enabled
        self.stats = CacheStats()
        self._root = PageNode(b"", -1, None)
        self._clock = 0
        self._size = 0
        self._read = 0
        self._candidates: list[tuple[int, int, PageNode]] = []

    @property
    def cached_pages(self) -> int:
        """Pages the tree holds, read or not."""
        return self._size

    def page_keys(self, tokens: NDArray[np.int32]) -> Iterator[bytes]:
        """The keys of the whole pages of a prompt that a hit may cover: all but those with its last token.

        The last token is always computed, since its hidden state starts the search.
        """
        size = self.pool.page_size
        raw = tokens.astype(_KEY_DTYPE, copy=False).tobytes()
        return (raw[4 * size * i : 4 * size * (i + 1)] for i in range((len(tokens) - 1) // size))

    def match(self, tokens: NDArray[np.int32]) -> list[PageNode]:
        """The longest cached path that spells a prefix of ``tokens``; does not lock or count it."""
        node = self._root
        path: list[PageNode] = []
        if not self.enabled:
            return path
        for key in self.page_keys(tokens):
            child = node.children.get(key)
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def lock(self, path: Sequence[PageNode]) -> None:
        """Keep the pages of a path from eviction until :meth:`unlock`."""
        self._clock += 1
        for node in path:
            self._read += node.readers == 0
            node.readers += 1
            node.last_used = self._clock

    def unlock(self, path: Sequence[PageNode]) -> None:
        """End one :meth:`lock`."""
        for node in path:
            node.readers -= 1
            self._read -= node.readers == 0
            self._queue(node)

    def insert(self, tokens: NDArray[np.int32], pages: Sequence[int]) -> list[int]:
        """Keep the whole pages of a prefilled prompt; returns the pages that the tree did not take.

        ``pages`` are the prompt's pages in order. A page whose content is cached already, under another
        number, stays the caller's to give back, as does the last, partial one.
        """
        keys = list(self.page_keys(tokens)) if self.enabled else []
        node, spare = self._root, list(pages[len(keys) :])
        self._clock += 1
        for key, page in zip(keys, pages, strict=False):
            child = node.children.get(key)
            if child is None:
                child = PageNode(key, page, node)
                node.children[key] = child
                self._size += 1
            elif child.page != page:
                spare.append(page)
            child.last_used = self._clock
            node = child
        self._queue(node)
        return spare

    def evict(self, count: int) -> int:
        """Give back up to ``count`` unread pages, least recently used leaves first; returns how many.

        Takes time by ``count``, not by the size of the tree: a server's cache is full, and every wave evicts. (A walk
        over the leaves of a full pool for each request: 210 requests/s of a server that does 667; H200s, 2026-11-30.)
        """
        freed: list[int] = []
        while self._candidates and len(freed) < count:
            used, page, node = heapq.heappop(self._candidates)
            node.queued = False
            if used != node.last_used:
                self._queue(node)
            elif _evictable(node):
                freed.append(page)
                parent = node.parent
                assert parent is not None
                del parent.children[node.key]
                self._queue(parent)
        self.pool.give_back(freed)
        self._size -= len(freed)
        self.stats.evicted_pages += len(freed)
        return len(freed)

    def evictable_pages(self) -> int:
        """Pages that :meth:`evict` could free now: readers lock whole paths, so every unread node can go."""
        return self._size - self._read

    def flush(self) -> int:
        """Evict everything that no wave reads; returns the number of pages."""
        return self.evict(self._size)

    def _queue(self, node: PageNode) -> None:
        """Make a node that could go now a candidate. Whoever makes one evictable calls this; later uses need not, an
        outdated entry is put right when its turn comes, which is never too late: uses only move a node back.
        """
        if _evictable(node) and not node.queued:
            node.queued = True
            heapq.heappush(self._candidates, (node.last_used, node.page, node))


def _evictable(node: PageNode) -> bool:
    return not node.children and node.readers == 0 and node.parent is not None
