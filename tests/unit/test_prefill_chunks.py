"""Cutting prompts into passes changes nothing but the number of passes (SPEC P3, R1)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_checkpoint import VOCAB, write_checkpoint

from flashrec import Engine, EngineConfig, Request, Result
from flashrec.runtime import prefill
from flashrec.runtime.prefill import Segment, chunks, lay_out

PROMPTS = [tuple((5 * seed + 3 * place + place * place) % VOCAB for place in range(9 + 23 * seed)) for seed in range(4)]


def passes(cached: list[int], lengths: list[int], limit: int) -> list[list[Segment]]:
    return [list(segments) for segments in chunks(cached, lengths, limit)]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=5), st.integers(1, 50))
def test_every_uncached_token_is_in_one_pass_in_order(members: list[tuple[int, int]], limit: int) -> None:
    cached = [start for start, _ in members]
    lengths = [start + more for start, more in members]
    found = passes(cached, lengths, limit)
    tokens = [(s.member, place) for segments in found for s in segments for place in range(s.start, s.end)]
    wanted = [(member, place) for member in range(len(members)) for place in range(cached[member], lengths[member])]
    assert tokens == wanted
    sizes = [sum(segment.end - segment.start for segment in segments) for segments in found]
    assert set(sizes[:-1]) <= {limit}
    assert 1 <= sizes[-1] <= limit
    assert all(segment.start < segment.end for segments in found for segment in segments)


def test_a_pass_ends_inside_a_prompt_and_the_next_begins_there() -> None:
    assert passes([0, 4], [5, 9], 7) == [[Segment(0, 0, 5), Segment(1, 4, 6)], [Segment(1, 6, 9)]]
    assert passes([0], [4], 2) == [[Segment(0, 0, 2)], [Segment(0, 2, 4)]]
    assert passes([], [], 2) == []


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=5),
    st.integers(1, 50),
    st.sampled_from([1, 5, 16]),
)
def test_every_token_is_laid_out_where_its_page_lies(members: list[tuple[int, int]], limit: int, size: int) -> None:
    rng = np.random.default_rng(0)
    wave: list[Any] = []
    for start, more in members:
        length = start + more
        pages = rng.integers(1, 1000, -(-length // size)).tolist()
        tokens = rng.integers(0, 1000, length, dtype=np.int32)
        wave.append(SimpleNamespace(tokens=tokens, pages=pages, length=length))
    for segments in passes([start for start, _ in members], [member.length for member in wave], limit):
        tokens, meta = lay_out(wave, segments, size)
        asked = [(wave[seg.member], place) for seg in segments for place in range(seg.start, seg.end)]
        assert tokens[0].tolist() == [member.tokens[place] for member, place in asked]
        assert tokens[1].tolist() == meta.positions.tolist() == [place for _, place in asked]
        slots = [member.pages[place // size] * size + place % size for member, place in asked]
        assert tokens[2].tolist() == slots
        assert meta.ends.tolist() == [at for at, (member, place) in enumerate(asked) if place + 1 == member.length]
        assert (meta.query_lens, meta.kv_lens) == ([s.end - s.start for s in segments], [s.end for s in segments])
        for row, seg in zip(meta.page_table.tolist(), segments, strict=True):
            count = -(-seg.end // size)
            assert row == wave[seg.member].pages[:count] + [0] * (len(row) - count)
        assert {tokens.dtype, meta.page_table.dtype, meta.ends.dtype} == {np.dtype(np.int32)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def engine(checkpoint: Path, **fields: int | bool) -> Engine:
    return Engine(EngineConfig(model_path=checkpoint, device="cpu", invariance_check=False, max_rows=64,
                               max_beam_width=48, **fields))  # fmt: skip


def searched(engine: Engine) -> list[tuple[object, ...]]:
    requests = [Request(input_ids=prompt, n=5, max_tokens=3, ignore_eos=True) for prompt in PROMPTS]
    return [tuple(result.beams) for result in engine.generate(requests)]


def forward_passes(engine: Engine) -> int:
    engine.profiler.forward_passes = 0
    searched(engine)
    return int(engine.profiler.forward_passes)


@pytest.mark.parametrize("limit", [16, 33, 50, 1000])
def test_chunks_have_the_bits_of_the_whole(checkpoint: Path, limit: int) -> None:
    whole = searched(engine(checkpoint))
    chunked = engine(checkpoint, max_prefill_tokens=limit)
    assert searched(chunked) == whole
    # A warm cache leaves other pieces to compute, in other passes.
    again = chunked.generate([Request(input_ids=PROMPTS[3], n=5, max_tokens=3, ignore_eos=True)])
    assert again[0].cached_tokens == 64
    assert tuple(again[0].beams) == whole[3]


def test_passes_are_as_many_as_the_limit_makes_them(checkpoint: Path) -> None:
    total = sum(map(len, PROMPTS))
    decode = 2
    for limit in (16, 50):
        cold = engine(checkpoint, max_prefill_tokens=limit, disable_radix_cache=True)
        assert forward_passes(cold) == -(-total // limit) + decode


def test_every_page_size_has_the_same_bits(checkpoint: Path) -> None:
    wanted = searched(engine(checkpoint))
    for page_size in (1, 7, 64):
        assert searched(engine(checkpoint, page_size=page_size, max_prefill_tokens=40)) == wanted


def test_a_pass_that_forgets_where_it_starts_would_be_seen(checkpoint: Path) -> None:
    def from_zero(cached: list[int], lengths: list[int], limit: int) -> list[list[Segment]]:
        pieces = passes(cached, lengths, limit)
        return [[Segment(s.member, max(0, s.start - 1), s.end - 1) for s in one[:-1]] + one[-1:] for one in pieces]

    whole = searched(engine(checkpoint))
    chunked = engine(checkpoint, max_prefill_tokens=33)
    with mock.patch.object(prefill, "chunks", from_zero):
        assert searched(chunked) != whole


def test_cached_and_computed_tokens_are_counted(checkpoint: Path) -> None:
    warm = engine(checkpoint)
    prompt = PROMPTS[2]
    results: list[Result] = []
    for _ in range(2):
        results += warm.generate([Request(input_ids=prompt, n=2, max_tokens=2, ignore_eos=True)])
    assert [result.cached_tokens for result in results] == [0, (len(prompt) - 1) // 16 * 16]
    assert all(result.prompt_tokens == len(prompt) for result in results)


@pytest.mark.parametrize(("requests", "sizes"), [(1, [1]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_warming_up_launches_passes_of_few_prompts_and_many_and_leaves_nothing(
    checkpoint: Path, requests: int, sizes: list[int]
) -> None:
    launched = []
    real = prefill.Prefill._uncaptured

    def noted(self: prefill.Prefill, tokens: object, meta: prefill.PrefillMeta) -> object:
        launched.append((list(meta.query_lens), list(meta.ends)))
        return real(self, tokens, meta)

    with mock.patch.object(prefill.Prefill, "_uncaptured", noted):
        started = engine(checkpoint, max_requests=requests)
        assert launched == [], "on a CPU nothing is compiled"
        started._prefill.warm_up(requests)
    assert launched == [([1] * size, list(range(size))) for size in sizes]
    pool = started.parts.pool
    assert not pool.k[:, pool.page_size :].any()
    assert not pool.v[:, pool.page_size :].any()
    assert started.stats()["waves"] == started.stats()["missed_tokens"] == started.profiler.forward_passes == 0
    started.close()
