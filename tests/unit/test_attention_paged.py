"""Attention over the paged pool against PyTorch's own, and its bits across chunks and caches (SPEC R1, R2)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from attention_lab import DIM, Lab, Prompt
from hypothesis import given
from hypothesis import strategies as st
from tiny_checkpoint import write_checkpoint

from flashrec import Engine, EngineConfig
from flashrec.attention import paged
from flashrec.attention.base import DecodeMeta
from flashrec.attention.paged import PagedAttention
from flashrec.batch import Quantized
from flashrec.kernels import paged_attention
from flashrec.kernels.decode_work import decode_work
from flashrec.kernels.ops import by_tile_height
from flashrec.kernels.prefill_attention import paged_prefill_attention
from flashrec.kernels.quantize import quant_per_token
from flashrec.kernels.tiles import rows_per_tile

HEADS = st.sampled_from([(4, 2), (4, 4), (6, 2), (8, 1)])
PAGE_SIZES = st.sampled_from([1, 5, 16, 64, 128])


@st.composite
def prompts(draw: st.DrawFn) -> list[Prompt]:
    found = []
    for _ in range(draw(st.integers(1, 3))):
        length = draw(st.sampled_from([1, 2, 15, 16, 17, 63, 64, 65, 130]))
        found.append(Prompt(length, draw(st.integers(0, length - 1))))
    return found


@given(prompts(), HEADS, PAGE_SIZES, st.sampled_from([torch.float32, torch.float8_e4m3fn]))
def test_prefill_equals_torch(wave: list[Prompt], heads: tuple[int, int], page_size: int, dtype: torch.dtype) -> None:
    lab = Lab(wave, heads, page_size, dtype=dtype)
    meta = lab.meta(wave)
    q = lab.queries(sum(meta.query_lens))
    for layer in range(2):
        found = lab.prefill(meta, q, layer).split(list(meta.query_lens))
        for index, (prompt, part) in enumerate(zip(wave, q.split(list(meta.query_lens)), strict=True)):
            seen = torch.arange(prompt.length) <= torch.arange(prompt.cached, prompt.length).unsqueeze(1)
            wanted = lab.sdpa(part, lab.slots(index), layer, seen)
            torch.testing.assert_close(found[index].double(), wanted, atol=2e-5, rtol=2e-5)


def in_pieces(lab: Lab, q: torch.Tensor, cuts: Sequence[int]) -> torch.Tensor:
    """The first prompt's attention, computed in passes that end at ``cuts``."""
    pieces = []
    for start, end in itertools.pairwise([0, *cuts, lab.prompts[0].length]):
        pieces.append(lab.prefill(lab.meta([Prompt(end, start)], [0]), q[start:end]))
    return torch.cat(pieces)


@given(st.sampled_from([17, 64, 65, 130, 200]), HEADS, PAGE_SIZES, st.data())
def test_whole_chunked_and_cached_prefill_have_the_same_bits(
    length: int, heads: tuple[int, int], page_size: int, data: st.DataObject
) -> None:
    lab = Lab([Prompt(length), Prompt(70), Prompt(3)], heads, page_size)
    q = lab.queries(length)
    whole = lab.prefill(lab.meta([Prompt(length)], [0]), q)
    cuts = data.draw(st.lists(st.integers(1, length - 1), unique=True, max_size=4).map(sorted))
    assert torch.equal(in_pieces(lab, q, cuts), whole)
    cached = data.draw(st.integers(1, length - 1))
    among = lab.meta([Prompt(70, 9), Prompt(length, cached), Prompt(3)], [1, 0, 2])
    found = lab.prefill(among, torch.cat((lab.queries(61), q[cached:], lab.queries(3))))
    assert torch.equal(found[61 : 61 + length - cached], whole[cached:])


def test_a_long_pass_is_cut_into_tall_tiles_and_keeps_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kernels' places are taken by the reference, which notes the tiles that it got."""
    heights: list[tuple[str, int]] = []

    def noting(name: str) -> Callable[..., torch.Tensor]:
        def kernel(*operands: Any) -> torch.Tensor:
            heights.append((name, operands[8]))
            return paged_prefill_attention(*operands)

        return kernel

    by_height = by_tile_height(noting("gluon"), noting("triton"))
    monkeypatch.setattr(paged, "TALL_TOKENS", 150)
    monkeypatch.setattr(paged, "TALL_CONTEXT", 130)
    wave = [Prompt(130), Prompt(40, 7)]
    lab = Lab(wave)
    q = lab.queries(163)
    whole = lab.prefill(lab.meta(wave), q)
    ends = lab.attention.prefill_ends(lab.meta(wave))(q[[129, 162]], 0)
    shared = replace(lab.attention.ops, paged_prefill_attention=by_height, tall_tiles=True)
    lab.attention = PagedAttention(lab.pool, lab.num_heads, shared)
    short = rows_per_tile(4, 2)
    cases = (
        (wave, [0, 1], ("gluon", 2 * short)),
        ([Prompt(130)], [0], ("triton", short)),  # too few tokens
        ([Prompt(129), Prompt(40, 7)], [0, 1], ("triton", short)),  # not far enough into a prompt
    )
    for parts, rows, used in cases:
        heights.clear()
        found = lab.prefill(lab.meta(parts, rows), q[: sum(part.length - part.cached for part in parts)])
        assert heights == [used]
        assert torch.equal(found[:129], whole[:129])
    heights.clear()
    assert torch.equal(lab.attention.prefill_ends(lab.meta(wave))(q[[129, 162]], 0), ends)
    for tokens, used in ((192, ("gluon", 2 * short)), (149, ("triton", short))):
        static, plan = lab.static(tokens, 2)
        parts = wave if tokens == 192 else [Prompt(130)]
        plan(lab.meta(parts, list(range(len(parts)))))
        padded = torch.zeros(tokens, lab.num_heads, DIM)
        count = sum(part.length - part.cached for part in parts)
        padded[:count] = q[:count]
        assert torch.equal(static.attend(padded, 0)[:count], whole[:count])
        assert heights[-1] == used
    assert heights[0] == ("triton", short)


def test_tiles_that_start_at_the_chunk_would_be_seen() -> None:
    """Keys reduced in tiles of another size for a warm pass: the control of the test above."""
    lab = Lab([Prompt(200)])
    q = lab.queries(200)
    whole = lab.prefill(lab.meta([Prompt(200)]), q)
    with mock.patch.object(paged_attention, "KV_TILE", 48):
        assert not torch.equal(in_pieces(lab, q, [90]), whole)


def test_static_prefill_forgets_the_pass_before() -> None:
    wave = [Prompt(130), Prompt(40, 7), Prompt(90, 80)]
    lab = Lab(wave)
    static, plan = lab.static(256, 4)
    for parts, rows in ((wave, [0, 1, 2]), ([Prompt(33, 2)], [1]), ([Prompt(90, 12), Prompt(1)], [2, 0])):
        meta = lab.meta(parts, rows)
        count = sum(meta.query_lens)
        q = torch.zeros(256, lab.num_heads, DIM)
        q[:count] = lab.queries(count)
        plan(meta)
        assert torch.equal(static.attend(q, 1)[:count], lab.prefill(meta, q[:count], 1))


@given(prompts(), HEADS, PAGE_SIZES, st.data())
def test_the_ends_alone_have_the_bits_they_have_among_all(
    wave: list[Prompt], heads: tuple[int, int], page_size: int, data: st.DataObject
) -> None:
    lab = Lab(wave, heads, page_size)
    ending = data.draw(st.lists(st.booleans(), min_size=len(wave), max_size=len(wave)))
    meta = lab.meta(wave, ending=ending)
    q = lab.queries(sum(meta.query_lens))
    rows = torch.from_numpy(meta.ends)
    wanted = lab.prefill(meta, q, 1)[rows]
    found = lab.attention.prefill_ends(meta)(q[rows], 1)
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found, wanted)
    static, plan = lab.static(512, 4)
    plan(meta)
    padded = torch.zeros(4, lab.num_heads, DIM)
    padded[: len(rows)] = q[rows]
    assert torch.equal(static.attend_ends(padded, 1)[: len(rows)], wanted)


def dequantised(activation: torch.Tensor | Quantized) -> torch.Tensor:
    assert isinstance(activation, Quantized)
    return activation.values.float() * activation.scale


@given(
    st.lists(st.tuples(st.sampled_from([1, 16, 63, 64, 100]), st.integers(1, 40)), min_size=1, max_size=3),
    HEADS,
    PAGE_SIZES,
    st.integers(1, 3),
    st.sampled_from([torch.float32, torch.float8_e4m3fn]),
)
def test_decode_through_ancestors_equals_torch(
    wave: list[tuple[int, int]], heads: tuple[int, int], page_size: int, stored: int, dtype: torch.dtype
) -> None:
    widths = [width for _, width in wave]
    rows = sum(widths) + 5
    lab = Lab([Prompt(length) for length, _ in wave], heads, page_size, beam_slots=3 * rows, dtype=dtype)
    owner = np.repeat(np.arange(len(wave)), widths)
    starts = np.cumsum(widths) - widths
    rng = np.random.default_rng(stored)
    ancestors = torch.zeros(3, rows, dtype=torch.int32)
    for step in range(3):
        ancestors[step, : sum(widths)] = torch.from_numpy(starts[owner] + rng.integers(0, np.array(widths)[owner]))
    ancestors[stored - 1] = torch.arange(rows)
    lengths = [length for length, _ in wave]
    meta = DecodeMeta(
        page_table=lab.table(),
        context_len=torch.tensor(lengths, dtype=torch.int32),
        work=decode_work(widths, lengths, lab.attention.tile_rows, lab.pool.num_kv_heads, spare=5),
        ancestors=ancestors,
        stored=stored,
    )
    q = lab.queries(rows)
    found = lab.attention.decode(meta)(q, 1)
    assert isinstance(found, torch.Tensor)
    quantising = PagedAttention(lab.pool, lab.num_heads, lab.attention.ops, quantize=True)
    assert torch.equal(dequantised(quantising.decode(meta)(q, 1)), dequantised(Quantized(*quant_per_token(found))))
    for row, request in enumerate(owner.tolist()):
        beam = torch.tensor([lab.pool.beam_base + step * rows + int(ancestors[step, row]) for step in range(stored)])
        wanted = lab.sdpa(q[row : row + 1], torch.cat((lab.slots(request), beam)), 1)
        torch.testing.assert_close(found[row : row + 1].double(), wanted, atol=2e-5, rtol=2e-5)


PROMPT = (5, 9, 33, 2, 71, 40, 8, 8, 60, 17, 90, 3, 21, 50, 51, 52, 53, 60, 61)
STEPS = 4


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path = write_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    return Engine(EngineConfig(model_path=path, device="cpu", max_beam_width=48, invariance_check=False))


def errors(engine: Engine) -> list[float]:
    """How far each beam's sum is from the sum of next-token log-probabilities of recomputed prompts."""
    engine.flush_cache()
    mates = [PROMPT[:3], PROMPT[2:12]]
    result = engine.generate([mates[0], PROMPT, mates[1]], n=7, max_tokens=STEPS, ignore_eos=True)[1]
    assert len({beam.token_ids[:2] for beam in result.beams}) > 1
    found = []
    for beam in result.beams:
        total = 0.0
        prefixes = [PROMPT + beam.token_ids[:step] for step in range(STEPS)]
        for token, step in zip(beam.token_ids, engine.generate(prefixes, n=48, max_tokens=1), strict=True):
            total += {one.token_ids[0]: one.cumulative_logprob for one in step.beams}[token]
        found.append(abs(total - beam.cumulative_logprob))
    return found


def test_decode_equals_a_recomputed_forward(engine: Engine) -> None:
    assert max(errors(engine)) < 1e-4


def test_beams_that_keep_their_own_past_would_be_seen(engine: Engine) -> None:
    with mock.patch("flashrec.runtime.free.reorder_ancestors"):
        assert max(errors(engine)) > 1e-2
