"""The page pool and the radix cache: no page leaks, none has two owners, eviction takes the least recently used."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from numpy.typing import NDArray

from flashrec.errors import ConfigError
from flashrec.kvcache import radix
from flashrec.kvcache.pool import SCRATCH_PAGE, KVPool, PoolExhaustedError
from flashrec.kvcache.radix import PageNode, RadixCache, page_tag

PAGE = 4


def make_pool(pages: int = 9, head_dim: int = 2) -> KVPool:
    return KVPool.allocate(
        num_layers=1, num_kv_heads=1, head_dim=head_dim, num_pages=pages, page_size=PAGE, beam_slots=8,
        dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip


def tokens(*ids: int) -> NDArray[np.int32]:
    return np.array(ids, dtype=np.int32)


def nodes(cache: RadixCache) -> list[PageNode]:
    found, stack = [], list(cache._root.children.values())
    while stack:
        node = stack.pop()
        found.append(node)
        stack.extend(node.children.values())
    return found


def keep(cache: RadixCache, *ids: int) -> list[int]:
    """Prefill a prompt that nobody has cached and keep it; returns its pages."""
    pages = cache.pool.take(-(-len(ids) // PAGE))
    cache.pool.give_back(cache.insert(tokens(*ids), pages))
    return pages


def test_storage_starts_at_zero_and_has_the_beam_slots_last() -> None:
    pool = make_pool(5)
    assert pool.k.shape == pool.v.shape == (1, 5 * PAGE + 8, 1, 2)
    assert pool.beam_base == 5 * PAGE
    assert not pool.k.any()
    assert not pool.v.any()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_storage_on_a_cpu_takes_no_memory_until_it_is_written() -> None:
    before = resident_bytes()
    pool = make_pool(head_dim=1 << 20)
    assert resident_bytes() - before < pool.k.nbytes // 2
    pool.k.fill_(1.0)
    assert resident_bytes() - before > pool.k.nbytes // 2


def test_more_memory_than_there_can_be_is_said_with_the_settings_names() -> None:
    with pytest.raises(ConfigError, match=r"no .* bytes for keys or values .*; lower kv_pool_tokens or kv_pool_bytes"):
        make_pool(1 << 46)


def test_the_scratch_page_is_never_handed_out() -> None:
    pool = make_pool(5)
    assert sorted(pool.take(4)) == [1, 2, 3, 4]
    assert SCRATCH_PAGE == 0
    with pytest.raises(PoolExhaustedError, match="1 pages wanted, 0 free"):
        pool.take(1)


def test_a_failed_take_takes_nothing() -> None:
    pool = make_pool(5)
    with pytest.raises(PoolExhaustedError):
        pool.take(5)
    assert pool.free_pages == 4


def test_a_pool_without_a_page_is_an_error() -> None:
    with pytest.raises(ConfigError, match="kv_pool_tokens"):
        make_pool(1)


def test_a_match_is_the_longest_prefix_of_whole_pages() -> None:
    cache = RadixCache(make_pool())
    pages = keep(cache, *range(10))
    assert [node.page for node in cache.match(tokens(*range(10)))] == pages[:2]
    assert [node.page for node in cache.match(tokens(*range(8), 99, 98))] == pages[:2]
    assert [node.page for node in cache.match(tokens(*range(6), 99, 98))] == pages[:1]
    assert cache.match(tokens(0, 1, 2, 99, 4, 5)) == []


@pytest.mark.parametrize(("length", "whole"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_the_last_token_is_never_cached(length: int, whole: int) -> None:
    """Its hidden state starts the search, so a hit must leave it to be computed."""
    cache = RadixCache(make_pool())
    keep(cache, *range(length))
    assert cache.cached_pages == whole
    assert len(cache.match(tokens(*range(length)))) == whole


def test_a_page_that_was_cached_meanwhile_goes_back() -> None:
    cache = RadixCache(make_pool())
    first = cache.pool.take(2)
    second = cache.pool.take(2)
    cache.pool.give_back(cache.insert(tokens(*range(6)), first))
    assert cache.insert(tokens(*range(6)), second) == [second[1], second[0]]
    assert [node.page for node in cache.match(tokens(*range(6)))] == first[:1]


def test_eviction_takes_the_least_recently_used_leaf_and_spares_readers() -> None:
    cache = RadixCache(make_pool())
    keep(cache, 1, 1, 1, 1, 9)
    keep(cache, 2, 2, 2, 2, 9)
    keep(cache, 3, 3, 3, 3, 9)
    used = cache.match(tokens(1, 1, 1, 1, 9))
    cache.lock(used)
    cache.unlock(used)
    read = cache.match(tokens(2, 2, 2, 2, 9))
    cache.lock(read)
    assert cache.evictable_pages() == 2
    assert cache.evict(1) == 1
    assert cache.match(tokens(3, 3, 3, 3, 9)) == []
    assert cache.evict(5) == 1
    assert cache.match(tokens(1, 1, 1, 1, 9)) == []
    assert cache.match(tokens(2, 2, 2, 2, 9)) == read
    assert cache.stats.evicted_pages == 2


def test_eviction_costs_by_what_it_evicts_not_by_what_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's cache is always full: each request of each wave evicts a few of many thousand pages."""
    cache = RadixCache(make_pool(2003))
    for prompt in range(1000):
        keep(cache, *range(10 * prompt, 10 * prompt + 2 * PAGE + 1))
    for prompt in range(0, 1000, 2):  # every other one is used again, after all the others
        path = cache.match(tokens(*range(10 * prompt, 10 * prompt + 2 * PAGE + 1)))
        cache.lock(path)
        cache.unlock(path)
    looked_at = 0
    real = radix._evictable

    def counted(node: PageNode) -> bool:
        nonlocal looked_at
        looked_at += 1
        return real(node)

    monkeypatch.setattr(radix, "_evictable", counted)
    for _ in range(100):
        assert cache.evict(2) == 2
    assert looked_at < 100 * 20
    kept = {prompt for prompt in range(1000) if cache.match(tokens(*range(10 * prompt, 10 * prompt + 2 * PAGE + 1)))}
    assert kept == set(range(1000)) - set(range(1, 200, 2)), "the hundred that were used longest ago have gone"


def test_eviction_works_up_a_branch() -> None:
    cache = RadixCache(make_pool())
    keep(cache, *range(13))
    assert cache.evict(2) == 2
    assert len(cache.match(tokens(*range(13)))) == 1
    assert cache.flush() == 1
    assert cache.cached_pages == 0


def test_a_disabled_cache_keeps_nothing() -> None:
    cache = RadixCache(make_pool(), enabled=False)
    pages = cache.pool.take(3)
    assert sorted(cache.insert(tokens(*range(10)), pages)) == sorted(pages)
    assert cache.match(tokens(*range(10))) == []


def test_a_tag_names_the_whole_path() -> None:
    """Pinned, since it must be the same in every process; another page, order or predecessor gives another."""
    page = tokens(1, 2, 3, 4).tobytes()
    assert page_tag(0, page) == 329066248508919249
    assert page_tag(0, page) != page_tag(0, tokens(1, 2, 4, 3).tobytes())
    assert page_tag(1, page) != page_tag(0, page)
    assert 0 <= page_tag(0, page) < 2**63


@dataclass
class Running:
    """A request: its prompt, the cached pages that it reads, all its pages, and those that are its own."""

    prompt: NDArray[np.int32]
    path: list[PageNode]
    pages: list[int]
    own: list[int]
    kept: bool = False


class PoolAndCache(RuleBasedStateMachine):
    """Requests of random prompts over few tokens, so that prefixes collide; a dictionary is the model."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = RadixCache(make_pool(12))
        self.pool = self.cache.pool
        self.running: list[Running] = []

    @rule(ids=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def admit(self, ids: list[int]) -> None:
        prompt = tokens(*ids)
        path = self.cache.match(prompt)
        self.cache.lock(path)
        wanted = -(-len(ids) // PAGE) - len(path)
        short = wanted - self.pool.free_pages
        if 0 < short <= self.cache.evictable_pages():
            assert self.cache.evict(short) == short
        if wanted > self.pool.free_pages:
            self.cache.unlock(path)
            return
        own = self.pool.take(wanted)
        self.running.append(Running(prompt, path, [node.page for node in path] + own, own))

    @precondition(lambda self: not all(one.kept for one in self.running))
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from([one for one in self.running if not one.kept]))
        one.own, one.kept = self.cache.insert(one.prompt, one.pages), True
        path = self.cache.match(one.prompt)
        assert len(path) == (len(one.prompt) - 1) // PAGE
        self.cache.lock(path[len(one.path) :])
        one.path = path

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        one = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.cache.unlock(one.path)
        self.pool.give_back(one.own)

    @rule(count=st.integers(0, 4))
    def evict(self, count: int) -> None:
        before = {id(node): node for node in nodes(self.cache)}
        could = self.cache.evictable_pages()
        assert self.cache.evict(count) == min(count, could)
        left = {id(node) for node in nodes(self.cache)}
        gone = [node for key, node in before.items() if key not in left]
        assert all(node.readers == 0 for node in gone)
        # What stays and could have gone was used no earlier than what went: least recently used first.
        leaves = [node for node in nodes(self.cache) if not node.children and node.readers == 0]
        assert all(leaf.last_used >= node.last_used for leaf in leaves for node in gone)

    @rule()
    def flush(self) -> None:
        self.cache.flush()
        assert all(node.readers for node in nodes(self.cache))

    @invariant()
    def every_page_has_one_owner(self) -> None:
        owned = [*self.pool._free, *(node.page for node in nodes(self.cache))]
        owned += [page for one in self.running for page in one.own]
        assert sorted(owned) == list(range(1, self.pool.num_pages))

    @invariant()
    def nobody_can_take_a_page_that_is_read(self) -> None:
        read = {node.page for node in nodes(self.cache) if node.readers}
        for one in self.running:
            assert set(one.pages) <= read | set(one.own)

    @invariant()
    def readers_are_the_running_requests(self) -> None:
        for node in nodes(self.cache):
            assert node.readers == sum(node in one.path for one in self.running)
            assert node.readers <= (node.parent.readers if node.parent is not self.cache._root else node.readers)
        assert self.cache.cached_pages == len(nodes(self.cache))
        assert self.cache.evictable_pages() == sum(node.readers == 0 for node in nodes(self.cache))

    @invariant()
    def a_path_spells_its_prompt(self) -> None:
        for one in self.running:
            spelled = b"".join(node.key for node in one.path)
            assert one.prompt.tobytes()[: len(spelled)] == spelled


TestPoolAndCache = PoolAndCache.TestCase
TestPoolAndCache.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_state_machine_sees_a_double_owner() -> None:
    """Negative control: a cache that gives back a page it keeps breaks the invariant."""
    machine = PoolAndCache()
    machine.admit([0] * 9)
    one = machine.running.pop()
    machine.pool.give_back([*machine.cache.insert(one.prompt, one.pages), one.pages[0]])
    with pytest.raises(AssertionError):
        machine.every_page_has_one_owner()
