"""Which waiting requests share the next wave: by search depth, rows, pages and cached prefix."""

from __future__ import annotations

from collections.abc import Sequence

from flashrec.errors import RequestError
from flashrec.kvcache.pool import PoolExhaustedError
from flashrec.kvcache.radix import RadixCache
from flashrec.runtime.buffers import Bucket
from flashrec.runtime.member import Member, WaveKey


class Admission:
    """Holds the budgets of a wave and moves pages between the pool, the cache and its members."""

    def __init__(self, cache: RadixCache, buckets: Sequence[Bucket], *, max_filter_keys: int) -> None:
        self.cache = cache
        self.pool = cache.pool
        self.buckets = buckets
        self.max_filter_keys = max_filter_keys

    def largest(self, key: WaveKey) -> Bucket:
        """The largest bucket whose passes of this depth the beam slots hold: the budget of a wave."""
        passes = max(key.steps - 1, 1)
        fitting = [bucket for bucket in self.buckets if bucket.rows * passes <= self.pool.beam_slots]
        return fitting[-1] if fitting else Bucket(0, 0)

    def check_fits(self, member: Member) -> None:
        """Raise :class:`RequestError` for a request that no wave could ever hold."""
        if member.width > self.largest(member.key).rows:
            raise RequestError(
                "beam_width",
                f"{member.width} beams of {member.key.steps} tokens are above the row budget of "
                f"{self.largest(member.key).rows}; raise max_rows",
            )
        if member.filter_keys > self.max_filter_keys:
            raise RequestError(
                "exclude" if member.leaf_filter is not None and not member.leaf_filter.allow else "allow",
                f"{member.filter_keys} SIDs are above this engine's max_filter_keys of {self.max_filter_keys}",
            )
        if self._pages(member) > self.pool.usable_pages:
            raise RequestError(
                "input_ids",
                f"{member.length} tokens are above the KV pool of {self.pool.usable_pages * self.pool.page_size}",
            )

    def admit(self, waiting: Sequence[Member]) -> list[Member]:
        """Pick the next wave from ``waiting``, oldest first, and give its members their pages.

        The oldest request is always in; others of its depth and score space follow by longest cached
        prefix, then age, while rows, requests and pages last. Nobody is starved: each wave takes the head, and
        when a wave in flight holds the pages that the head needs, there is no next wave yet.
        """
        head = waiting[0]
        rest = [member for member in waiting[1:] if member.key == head.key]
        rest.sort(key=lambda member: -len(self.cache.match(member.tokens)))
        rows, keys, budget = 0, 0, self.largest(head.key)
        admitted: list[Member] = []
        for member in (head, *rest):
            if len(admitted) == budget.requests:
                break
            fits = rows + member.width <= budget.rows and keys + member.filter_keys <= self.max_filter_keys
            if fits and self._take_pages(member):
                admitted.append(member)
                rows += member.width
                keys += member.filter_keys
            elif member is head:
                break
        return admitted

    def finish(self, members: Sequence[Member], *, keep: bool) -> None:
        """End the members' use of their pages; with ``keep`` their prompts stay cached."""
        for member in members:
            if keep:
                spare = self.cache.insert(member.tokens, member.pages)
            else:
                spare = member.pages[len(member.path) :]
            self.cache.unlock(member.path)
            self.pool.give_back(spare)
            member.path, member.pages = [], []

    def _pages(self, member: Member) -> int:
        return -(-member.length // self.pool.page_size)

    def _take_pages(self, member: Member) -> bool:
        path = self.cache.match(member.tokens)
        self.cache.lock(path)
        wanted = self._pages(member) - len(path)
        short = wanted - self.pool.free_pages
        if short > 0 and short <= self.cache.evictable_pages():
            self.cache.evict(short)
        try:
            fresh = self.pool.take(wanted)
        except PoolExhaustedError:
            self.cache.unlock(path)
            return False
        member.path = path
        member.pages = [node.page for node in path] + fresh
        member.cached = len(path) * self.pool.page_size
        self.cache.stats.hit_tokens += member.cached
        self.cache.stats.missed_tokens += member.length - member.cached
        return True
