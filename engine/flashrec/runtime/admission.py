"""Which waiting requests share the next wave: by key, age, cached prefix, and the rows and pages that last."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from flashrec.errors import RequestError
from flashrec.kvcache.pool import PoolExhaustedError
from flashrec.kvcache.radix import RadixCache
from flashrec.runtime.buffers import Bucket
from flashrec.runtime.member import Member, WaveKey

LOOKAHEAD = 4
"""Candidates whose cached prefix is looked up, per place in a wave: a long queue must not cost the engine thread."""
HALVES_FROM = 8
"""Requests here, waiting and in flight, from which on they share the device by halves: see :meth:`Admission.admit`.

One H200, 303 tokens, n = 50, clients that ask again when they are answered, requests per second without / with, two
runs each, 2026-12-01: 16 at once 509, 512 / 546, 558; 24: 605, 615 / 653, 642; 64: 718, 740 / 752, 740; but 4: 271,
280 / 245, 264, where a wave of two takes nearly as long as one of three. From 5 to 15 nothing was measured.
"""


class Admission:
    """Holds the budgets of a wave and moves pages between the pool, the cache and its members.

    ``max_head_delay`` (seconds) bounds what reordering may cost a request: it is overtaken only by requests that
    arrived at most so much later, and having waited so long it goes before anything that a cached prefix favours.
    """

    def __init__(
        self, cache: RadixCache, buckets: Sequence[Bucket], *, max_filter_keys: int, max_head_delay: float
    ) -> None:
        self.cache = cache
        self.pool = cache.pool
        self.buckets = buckets
        self.max_filter_keys = max_filter_keys
        self.max_head_delay = max_head_delay

    def largest(self, key: WaveKey) -> Bucket:
        """The largest bucket whose passes of this depth the beam slots hold: the budget of a wave."""
        passes = max(key.steps - 1, 1)
        fitting = bisect_right(self.buckets, self.pool.beam_slots // passes, key=_rows)
        return self.buckets[fitting - 1] if fitting else Bucket(0, 0)

    def check_fits(self, member: Member) -> None:
        """Raise :class:`RequestError` for a request that no wave could ever hold."""
        if member.width > self.largest(member.key).rows:
            raise RequestError(
                "n" if member.request.beam_width is None else "beam_width",
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

    def enqueue(self, member: Member, now: float) -> None:
        """Give a request that arrives ``now`` its turn: later by the share of ``max_head_delay`` that its rows are of
        a wave's. Wide requests so let narrow ones pass for a while, and no longer: from then on seniority decides.
        """
        member.turn = now + self.max_head_delay * member.width / self.largest(member.key).rows
        member.late = now + self.max_head_delay

    def admit(self, waiting: Sequence[Member], now: float = 0.0, in_flight: int = 0) -> list[Member]:
        """Pick the next wave from ``waiting``, in order of arrival, and give its members their pages.

        The request whose turn is first is always in, and its key decides, so keys take turns as well. Others of that
        key follow while rows, requests, filter keys and pages last: those that are late ``now``, by turn, then those
        with the longest cached prefix. Nobody is starved: each wave takes the first, and when a wave in flight holds
        the pages that it needs, there is no next wave yet.

        Behind a wave ``in_flight`` of so many requests, the next takes half of all that are here where more than that
        wait. Waves of 16 and 16 leave the device no pause; those of 1 and 31, which 32 clients would fall into, cost as
        much and leave it idle while 31 answers go out.
        """
        head = min(waiting, key=_turn)
        budget = self.largest(head.key)
        rest = sorted((one for one in waiting if one.key == head.key and one is not head), key=_turn)
        late = [one for one in rest if one.late <= now]
        early = [one for one in rest if one.late > now][: LOOKAHEAD * budget.requests]
        early.sort(key=lambda one: -len(self.cache.match(one.tokens)))
        rows, keys = 0, 0
        admitted: list[Member] = []
        places = min(budget.requests, _half(len(waiting), in_flight))
        for member in (head, *late, *early):
            if len(admitted) == places:
                break
            fits = rows + member.width <= budget.rows and keys + member.filter_keys <= self.max_filter_keys
            if fits and self._take_pages(member):
                admitted.append(member)
                rows += member.width
                keys += member.filter_keys
            elif member is head:
                break
        return admitted

    def keep(self, members: Sequence[Member]) -> None:
        """Cache the members' prompts: what may read them from now on is queued behind the passes that write them."""
        for member in members:
            member.own = self.cache.insert(member.tokens, member.pages)
            path = self.cache.match(member.tokens)
            self.cache.lock(path[len(member.path) :])
            member.path = path

    def finish(self, members: Sequence[Member]) -> None:
        """End the members' use of their pages; those that are not cached go back to the pool."""
        for member in members:
            self.cache.unlock(member.path)
            self.pool.give_back(member.own)
            member.path, member.pages, member.own = [], [], []

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
        member.own = fresh
        member.cached = len(path) * self.pool.page_size
        self.cache.stats.hit_tokens += member.cached
        self.cache.stats.missed_tokens += member.length - member.cached
        return True


def _half(waiting: int, in_flight: int) -> int:
    """How many of those that wait may go next."""
    here = waiting + in_flight
    return -(-here // 2) if in_flight and here >= HALVES_FROM else waiting


def _turn(member: Member) -> float:
    return member.turn


def _rows(bucket: Bucket) -> int:
    return bucket.rows
