"""Which requests share a wave, and that pages always come back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_engine import ask, open_engine, prompt, write_shop

from flashrec import Engine, Request, RequestError
from flashrec.request import ScoreSpace
from flashrec.runtime.member import Member


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shop(tmp_path_factory.mktemp("shop"))


@pytest.fixture
def engine(shop: Path) -> Iterator[Engine]:
    """16 usable pages of 4 tokens, 64 rows, 4 requests."""
    engine = open_engine(shop, kv_pool_tokens=64, max_requests=4, max_filter_keys=6)
    yield engine
    engine.close()


def members(engine: Engine, *requests: Request) -> list[Member]:
    return [engine.prepare(request) for request in requests]


def admitted(engine: Engine, waiting: list[Member]) -> list[int]:
    """Places in ``waiting`` of the wave, in the wave's order; the pages go back at once."""
    wave = engine.admission.admit(waiting)
    places = [waiting.index(member) for member in wave]
    engine.admission.finish(wave)
    return places


def test_the_row_budget_bounds_a_wave(engine: Engine) -> None:
    waiting = members(engine, ask(3, n=30), ask(3, seed=1, n=30), ask(3, seed=2, n=5), ask(3, seed=3, n=4))
    assert admitted(engine, waiting) == [0, 1, 3]


def test_the_number_of_requests_bounds_a_wave(engine: Engine) -> None:
    assert admitted(engine, members(engine, *(ask(2, seed=seed) for seed in range(6)))) == [0, 1, 2, 3]


def test_pages_bound_a_wave(engine: Engine) -> None:
    """Lengths include the begin token: 28 tokens are 7 pages of the 16."""
    waiting = members(engine, ask(27), ask(27, seed=1), ask(27, seed=2), ask(6, seed=3))
    assert admitted(engine, waiting) == [0, 1, 3]


def test_the_oldest_is_always_in_and_its_key_decides(engine: Engine) -> None:
    waiting = members(engine, ask(5), ask(5, seed=1, score_space=ScoreSpace.LEVEL), ask(5, seed=2))
    assert admitted(engine, waiting) == [0, 2]
    assert admitted(engine, waiting[1:]) == [0]


def test_longest_cached_prefix_first_after_the_oldest(engine: Engine) -> None:
    engine.generate([ask(9, seed=5), ask(13, seed=6)])
    waiting = members(engine, ask(4, seed=1), ask(4, seed=2), ask(9, seed=5), ask(13, seed=6))
    assert admitted(engine, waiting) == [0, 3, 2, 1]


def test_filters_bound_a_wave(engine: Engine) -> None:
    assert engine.catalog is not None
    sids = [tuple(codes) for codes in engine.catalog.sids.tolist()]
    waiting = members(engine, ask(3, allow_sids=tuple(sids[:4])), ask(3, seed=1, exclude_sids=tuple(sids[:3])), ask(3))
    assert admitted(engine, waiting) == [0, 2]
    with pytest.raises(RequestError, match="7 SIDs are above this engine's max_filter_keys of 6"):
        engine.prepare(ask(3, allow_sids=tuple(sids[:7])))


def test_what_no_wave_could_hold_is_refused_before_it_waits(shop: Path, engine: Engine) -> None:
    with pytest.raises(RequestError, match=r"input_ids.* max_context of 64"):
        engine.prepare(ask(64))
    slim = open_engine(shop, catalog=False, max_rows=40, max_beam_width=40, max_decode_steps=8)
    try:
        slim.prepare(Request(input_ids=prompt(3), n=40, max_tokens=8))
    finally:
        slim.close()


def test_a_hit_takes_only_the_pages_it_lacks(engine: Engine) -> None:
    engine.generate([ask(11, seed=5)])
    free = engine.stats()["free_pages"]
    (member,) = engine.admission.admit(members(engine, ask(11, seed=5)))
    assert member.cached == 8
    assert engine.stats()["free_pages"] == free - 1
    assert [node.readers for node in member.path] == [1, 1]
    engine.admission.keep([member])
    engine.admission.finish([member])
    assert engine.stats()["free_pages"] == free


def test_eviction_makes_room_and_spares_the_wave_itself(engine: Engine) -> None:
    engine.generate([ask(27, seed=1)])
    engine.generate([ask(27, seed=2)])
    before = engine.stats()["evicted_pages"]
    wave = engine.admission.admit(members(engine, ask(27, seed=2), ask(30, seed=3)))
    assert len(wave) == 2
    assert wave[0].cached == 24
    pages = [page for member in wave for page in member.pages]
    assert len(pages) == len(set(pages)) == 7 + 8
    assert engine.stats()["evicted_pages"] > before
    engine.admission.finish(wave)


def test_a_wave_that_fails_gives_its_pages_back(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.generate([ask(11, seed=5)])
    free, cached = engine.stats()["free_pages"], engine.stats()["cached_pages"]

    def broken(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(engine.stage, "run", broken)
    with pytest.raises(RuntimeError, match="planted"):
        engine.generate([ask(11, seed=5), ask(20, seed=6)])
    assert (engine.stats()["free_pages"], engine.stats()["cached_pages"]) == (free, cached)
    assert engine.parts.cache.evictable_pages() == cached


def test_more_requests_than_a_wave_holds_are_all_answered_in_order(engine: Engine) -> None:
    requests = [ask(4 + 5 * (index % 5), seed=index, n=1 + index, rid=str(index)) for index in range(12)]
    results = engine.generate(requests)
    assert [result.rid for result in results] == [request.rid for request in requests]
    assert [len(result.beams) for result in results] == [request.n for request in requests]
    assert engine.stats()["waves"] > 2
    alone = [engine.generate([request])[0].beams for request in requests]
    assert [result.beams for result in results] == alone
