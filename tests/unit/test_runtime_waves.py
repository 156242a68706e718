"""A wave's layout on the static buffers, its chunks, and that its results do not depend on it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings
from tiny_engine import ask, open_engine, prompt, write_shop

from flashrec import Engine, Request, ScoreSpace
from flashrec.errors import NonFiniteError
from flashrec.kvcache.pool import SCRATCH_PAGE
from flashrec.runtime.buffers import bucket_of, row_buckets
from flashrec.runtime.prefill import chunks


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shop(tmp_path_factory.mktemp("shop"))


@pytest.fixture(scope="module")
def engine(shop: Path) -> Iterator[Engine]:
    engine = open_engine(shop, record_ledger=True)
    yield engine
    engine.close()


PROBE = ask(21, n=7, rid="probe")


@pytest.fixture(scope="module")
def alone(engine: Engine) -> tuple[object, ...]:
    engine.flush_cache()
    return engine.generate([PROBE])[0].beams


@given(st.integers(1, 20_000), st.integers(1, 64))
def test_buckets_hold_every_wave_and_waste_little(max_rows: int, max_requests: int) -> None:
    buckets = row_buckets(max_rows, max_requests)
    sizes = [bucket.rows for bucket in buckets]
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_rows
    assert all(1 <= bucket.requests <= min(max_requests, bucket.rows) for bucket in buckets)
    for rows in range(1, max_rows + 1, max(1, max_rows // 500)):
        size = bucket_of(rows, 1, buckets).rows
        assert size >= rows
        assert rows <= 64 or size <= 1.25 * rows


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 60)), min_size=1, max_size=8), st.integers(1, 50))
@example([(0, 16), (0, 16)], 16)
@example([(8, 9)], 1)
def test_chunks_cover_every_uncached_token_once_in_order(prompts: list[tuple[int, int]], limit: int) -> None:
    cached = [start for start, _ in prompts]
    lengths = [start + more for start, more in prompts]
    passes = list(chunks(cached, lengths, limit))
    assert all(0 < sum(seg.end - seg.start for seg in segments) <= limit for segments in passes)
    assert all(sum(seg.end - seg.start for seg in segments) == limit for segments in passes[:-1])
    flat = [(seg.member, place) for segments in passes for seg in segments for place in range(seg.start, seg.end)]
    assert flat == [(member, place) for member, start in enumerate(cached) for place in range(start, lengths[member])]


def test_requests_that_sample_have_waves_of_their_own(engine: Engine) -> None:
    """On a GPU they are scored by other operations: a greedy request in their wave would get other last bits."""
    greedy = [ask(5 + index, n=4, rid=f"greedy-{index}") for index in range(3)]
    sampled = [ask(9 + index, n=4, rid=f"sampled-{index}", temperature=0.7) for index in range(3)]
    alone = [engine.generate([request])[0].beams for request in greedy]
    waves = engine.stats()["waves"]
    mixed = engine.generate([greedy[0], sampled[0], greedy[1], sampled[1], sampled[2], greedy[2]])
    assert engine.stats()["waves"] == waves + 2
    assert [result.beams for result in mixed if result.rid.startswith("greedy")] == alone


def test_a_layout_overwrites_all_of_the_one_before(engine: Engine) -> None:
    """A wave of few rows after one that filled the bucket leaves what a fresh bucket would hold."""
    full = engine.admission.admit([engine.prepare(ask(30 + index, seed=index, n=8)) for index in range(6)])
    buffers = engine.stage.buffers(full)
    assert buffers.rows == 48
    buffers.load(full)
    engine.admission.finish(full)
    wave = engine.admission.admit([engine.prepare(ask(5, seed=9, n=20)), engine.prepare(ask(6, seed=8, n=13))])
    assert engine.stage.buffers(wave) is buffers
    layout = buffers.load(wave)
    assert layout.spans == [(0, 20), (20, 13)]
    for row, member in enumerate(wave):
        count = len(member.pages)
        assert buffers.page_table[row, :count].tolist() == member.pages
        assert (buffers.page_table[row, count:] == SCRATCH_PAGE).all()
    assert (buffers.page_table[2:] == SCRATCH_PAGE).all()
    assert buffers.context_len.tolist() == [6, 7] + [0] * (buffers.requests - 2)
    assert buffers.row_request.tolist() == [0] * 20 + [1] * 13 + [0] * 15
    assert buffers.later[:, :2].tolist() == [[0, 20], [20, 13], [0, 20], [20, 13]]
    assert buffers.first[:, :2].tolist() == [[0, 1], [1, 1], [0, 20], [20, 13]]
    assert not buffers.later[:, 2:].any()
    assert not buffers.first[:, 2:].any()
    tiles, states, pieces = buffers.work
    assert tiles.rows.sum() == 33
    used = int(states[-1])
    assert used == (tiles.rows > 0).sum(), "contexts of 6 and 7 tokens are one piece for each tile"
    assert sorted(pieces[:used, 6].tolist()) == list(range(used))
    assert (pieces[:used, 2] * pieces[:used, 4]).sum() == 20 * 6 + 13 * 7
    assert not pieces[used:].any()
    engine.admission.finish(wave)


@settings(max_examples=25)
@given(st.integers(0, 2**32))
def test_the_probe_has_the_same_bits_in_any_wave(engine: Engine, alone: tuple[object, ...], seed: int) -> None:
    rng = random.Random(seed)
    if rng.random() < 0.3:
        engine.flush_cache()
    mates = [
        ask(rng.randint(1, 40), seed=rng.randint(0, 9), n=rng.randint(1, 12), temperature=rng.choice((0.0, 0.0, 0.9)))
        for _ in range(rng.randint(0, 5))
    ]
    twin = Request(input_ids=(*PROBE.input_ids[:-1], rng.randint(0, 63)), n=2)
    wave = [*mates, *([twin] if rng.random() < 0.5 else [])]
    at = rng.randint(0, len(wave))
    wave.insert(at, PROBE)
    assert engine.generate(wave)[at].beams == alone


@pytest.mark.parametrize("rows", [7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64])
def test_the_probe_has_the_same_bits_at_every_bucket_edge(engine: Engine, alone: tuple[object, ...], rows: int) -> None:
    wave, left, used = [PROBE], rows - PROBE.n, engine.stats()["buckets"]
    while left:
        wave.insert(0, ask(6, seed=left, n=min(left, 20)))
        left -= wave[0].n
    assert engine.generate(wave)[-1].beams == alone
    size = bucket_of(rows, len(wave), row_buckets(64, 8)).rows
    assert engine.stats()["buckets"][size] == used.get(size, 0) + 1


@pytest.mark.parametrize(
    "fields",
    [
        {"max_prefill_tokens": 16},
        {"page_size": 1},
        {"page_size": 16},
        {"disable_radix_cache": True},
        {"kv_pool_tokens": 28, "max_context": 28},
        {"dense_trie_cells": 0},
        {"record_ledger": False},
        {"max_requests": 2},
    ],
    ids=str,
)
def test_settings_that_may_not_change_a_bit(shop: Path, alone: tuple[object, ...], fields: dict[str, object]) -> None:
    other = open_engine(shop, **({"record_ledger": True} | fields))
    try:
        for _ in range(2):
            assert other.generate([ask(8, seed=4), PROBE, ask(17, seed=5)])[1].beams == alone
    finally:
        other.close()


@pytest.mark.parametrize("space", ScoreSpace)
def test_equal_outputs_have_equal_ledgers(engine: Engine, space: ScoreSpace) -> None:
    """In other rows, on other pages, from a cold and a warm cache: the ledger hashes content, not places."""
    one = Request(input_ids=PROBE.input_ids, n=7, score_space=space, rid="probe")
    engine.flush_cache()
    engine.generate([one])
    ledger = engine.ledgers["probe"]
    mates = [ask(9, seed=seed, n=5, score_space=space) for seed in range(4)]
    for wave in ([*mates, one], [mates[0], one, *mates[1:]]):
        engine.generate(wave)
        assert engine.ledgers["probe"] == ledger
    engine.flush_cache()
    engine.generate([Request(input_ids=prompt(21, seed=77), n=7, score_space=space, rid="other")])
    differing = [
        name for name in ledger[0].digests if engine.ledgers["other"][0].digests[name] != ledger[0].digests[name]
    ]
    assert {"kv", "logits", "scores"} <= set(differing)
    assert "seq_lens" not in differing


@pytest.mark.parametrize("semantics", ["transformers", "sglang"])
def test_searches_without_a_catalog_have_ledgers_too(engine: Engine, semantics: Any) -> None:
    """The same content in other rows and on other pages; another prompt of that length; another length penalty, which
    no step sees; a stop token, which the first selection that meets it does."""
    free: dict[str, Any] = {"constrained": False, "max_tokens": 4, "semantics": semantics, "ignore_eos": True}
    one = Request(input_ids=PROBE.input_ids, n=7, rid="probe", **free)
    engine.flush_cache()
    (alone,) = engine.generate([one])
    ledger = engine.ledgers["probe"]
    assert [step.step for step in ledger] == [0, 1, 2, 3]
    mates = [ask(9, seed=seed, n=5, **free) for seed in range(4)]
    for wave in ([*mates, one], [mates[0], one, *mates[1:]]):
        engine.generate(wave)
        assert engine.ledgers["probe"] == ledger
    engine.generate([replace(one, length_penalty=0.5)])
    assert engine.ledgers["probe"] == ledger
    engine.generate([replace(one, input_ids=prompt(21, seed=77))])
    other = engine.ledgers["probe"][0].digests
    assert {name for name in other if other[name] == ledger[0].digests[name]} <= {"seq_lens", "positions", "parents"}
    stop = alone.beams[0].token_ids[1]
    engine.generate([replace(one, ignore_eos=semantics == "transformers", stop_token_ids=(stop,))])
    first, second = (step.digests for step in engine.ledgers["probe"][:2])
    assert first == ledger[0].digests
    assert second["logits"] == ledger[1].digests["logits"]
    assert second["tokens"] != ledger[1].digests["tokens"]


def test_a_page_overwritten_behind_the_caches_back_shows_in_the_ledger(engine: Engine) -> None:
    """Negative control of the tags: the page keeps the name that its last writer gave it."""
    engine.flush_cache()
    engine.generate([PROBE])
    clean = engine.ledgers["probe"]
    (node, *_) = engine.parts.cache.match(engine.prepare(PROBE).tokens)
    engine.parts.pool.give_back([node.page])
    engine.generate([ask(3, seed=50, rid="thief")])
    engine.generate([PROBE])
    assert engine.ledgers["probe"][0].digests["kv"] != clean[0].digests["kv"]
    engine.parts.pool._free.remove(node.page)
    engine.flush_cache()


def test_a_request_that_is_not_finite_fails_alone(engine: Engine, alone: tuple[object, ...]) -> None:
    poisoned = ask(5, seed=60, rid="poisoned")
    embedding = engine.parts.model.embedding  # type: ignore[attr-defined]
    row = embedding[poisoned.input_ids[2]].clone()
    spared = poisoned.input_ids[2] not in PROBE.input_ids
    assert spared, "choose another seed: the probe holds the poisoned word"
    with torch.inference_mode():
        embedding[poisoned.input_ids[2]] = torch.nan
    try:
        wave = engine.admission.admit([engine.prepare(poisoned), engine.prepare(PROBE)])
        outcomes = dict(zip((member.request.rid for member in wave), engine.run_wave(wave), strict=True))
    finally:
        with torch.inference_mode():
            embedding[poisoned.input_ids[2]] = row
        engine.flush_cache()
    assert isinstance(outcomes["poisoned"], NonFiniteError)
    assert outcomes["probe"].beams == alone  # type: ignore[union-attr]


def test_a_wave_reads_the_prompts_of_the_one_in_flight_before_it(engine: Engine) -> None:
    """They are queued behind the passes that write them, on one stream."""
    engine.flush_cache()
    first, again = ask(40, seed=77, n=3, rid="first"), ask(40, seed=77, n=5, rid="again")
    cold = engine.generate([again])[0]
    engine.flush_cache()
    free = engine.parts.pool.free_pages
    flight = engine.launch(engine.admission.admit([engine.prepare(first)]))
    (follower,) = engine.admission.admit([engine.prepare(again)])
    assert follower.cached == 40
    engine.finish(flight)
    assert engine.flush_cache() == 0  # the follower reads them
    (warm,) = engine.finish(engine.launch([follower]))
    assert warm.beams == cold.beams
    engine.flush_cache()
    assert engine.parts.pool.free_pages == free
