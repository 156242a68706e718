"""Decode attention's pieces of context: each token once, in the splits of its length, whoever takes them."""

from __future__ import annotations

from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from flashrec.kernels import decode_work
from flashrec.kernels._triton import MODE, TritonMode
from flashrec.kernels.decode_attention import shared_prefix_attention
from flashrec.kernels.decode_attention_triton import shared_prefix_attention_triton
from flashrec.kernels.decode_work import AT_ONCE, SPLIT_TOKENS, DecodeWork, most_pieces, most_splits, work_tables
from flashrec.kernels.tiles import RowTiles, tile_table
from flashrec_harness.guarded import PoisonedOutputs
from flashrec_harness.kernels_suite import lanes

HEADS, KV_HEADS, DIM, PAGE, TILE = 4, 2, 16, 64, 4
WAVES = {
    "some of several splits": ([SPLIT_TOKENS // 2 + 90, 3, SPLIT_TOKENS // 4, 1], [6, 9, 1, 5]),
    "one long among many": ([SPLIT_TOKENS + 200, *[30] * 6], [1, 4, 4, 4, 4, 4, 4]),
    "alone": ([SPLIT_TOKENS // 4 + 1], [3]),
}


def _splits(length: int) -> int:
    """By hand: splits of 256 tokens up to 1,024, of 512 up to 4,096, of 1,024 beyond."""
    size = 256 if length <= 1024 else 512 if length <= 4096 else 1024
    return -(-length // size)


@pytest.mark.parametrize("tokens", [0, 1, 256, 257, 600, 1024, 1025, 1536, 2560, 4096, 4097, 5120, 8192, 8193, 40_000])
def test_there_is_room_for_every_context_that_fits(tokens: int) -> None:
    assert most_splits(tokens) == max(map(_splits, range(1, tokens + 1)), default=0)


@hypothesis.given(
    st.lists(st.tuples(st.integers(1, 70), st.one_of(st.integers(1, 700), st.integers(1, 20_000))), max_size=40),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([1, 8, 32]),
    st.integers(0, 4),
)
def test_pieces_cover_each_context_once_in_splits_of_its_length(
    wave: list[tuple[int, int]], kv_heads: int, tile_rows: int, spare: int
) -> None:
    lengths = [length for _, length in wave]
    table = tile_table([width for width, _ in wave], tile_rows)
    table = np.concatenate((table, np.zeros((3, spare), dtype=np.int32)), axis=1)
    states, pieces = work_tables(table, lengths, kv_heads)
    assert len(pieces) <= most_pieces(table.shape[1], kv_heads, max(lengths, default=1))
    assert states[0] == 0
    assert states[-1] == len(pieces)
    sizes = (pieces[:, 4] - pieces[:, 3]).tolist()
    assert sizes == sorted(sizes, reverse=True)
    by_state = {int(piece[6]): piece.tolist() for piece in pieces}
    average = sum(lengths[request] for request in table[0, : table.shape[1] - spare]) / -(-AT_ONCE // kv_heads)
    for tile, (request, row0, rows) in enumerate(table.T.tolist()):
        mine = [by_state[state] for state in range(states[tile], states[tile + 1])]
        if rows == 0:
            assert not mine
            continue
        length = lengths[request]
        assert {tuple(piece[:3]) for piece in mine} == {(request, row0, rows)}
        assert [0, *(piece[4] for piece in mine)] == [*(piece[3] for piece in mine), length]
        assert {-(-length // piece[5]) for piece in mine} == {_splits(length)}
        assert len(mine) == (_splits(length) if length > 2 * average else 1)
        assert len(mine) == 1 or {piece[4] - piece[3] for piece in mine[:-1]} == {mine[0][5]}


def test_one_long_context_is_shared_and_short_ones_are_not() -> None:
    """By hand: 64 tiles of 303 tokens and two of 5,000 are 29,392 tokens, 891 for each of 33 programs."""
    states, pieces = work_tables(tile_table([50] * 33, 32), [303] * 32 + [5000], 8)
    assert np.diff(states).tolist() == [1] * 64 + [5, 5]
    longest = [(0, 1024), (1024, 2048), (2048, 3072), (3072, 4096)] * 2 + [(4096, 5000)] * 2
    assert list(map(tuple, pieces[:10, 3:5].tolist())) == longest


def _arguments(device: torch.device, wave: str, work: DecodeWork, spare: int = 2) -> tuple[Any, ...]:
    """A wave's requests in buffers for ``spare`` more, which are inert."""
    lengths, beams = WAVES[wave]
    generator = torch.Generator().manual_seed(3)
    rows, pages = sum(beams), max(lengths) // PAGE + 1
    base = len(lengths) * pages * PAGE
    k, v = (torch.randn(base + 2 * rows, KV_HEADS, DIM, generator=generator).to(device) for _ in range(2))
    q = torch.randn(rows, HEADS, DIM, generator=generator).to(device)
    table = torch.zeros(len(lengths) + spare, pages, dtype=torch.int32)
    table[: len(lengths)] = torch.randperm(len(lengths) * pages, generator=generator).view(len(lengths), pages)
    length = torch.tensor([*lengths, *[0] * spare], dtype=torch.int32)
    ancestors = torch.arange(2 * rows, dtype=torch.int32).view(2, rows) % rows
    head = (q, k, v, table.to(device), PAGE, length.to(device), work, TILE)
    return (*head, base, rows, 2, ancestors.to(device), DIM**-0.5, 1.0, 1.0)


def _work(device: torch.device, wave: str, *, apart: bool, parallel: bool | None) -> DecodeWork:
    """The wave's work with room for more, and ``apart``: with empty tiles before, between and behind its tiles."""
    lengths, beams = WAVES[wave]
    table = tile_table(beams, TILE)
    if apart:
        wide = np.zeros((3, 3 * table.shape[1] + 2), dtype=np.int32)
        wide[:, 1:-1:3] = table
        table = wide
    states, pieces = work_tables(table, lengths, KV_HEADS, parallel=parallel)
    room = np.full((len(pieces) + 3, decode_work.PIECE_FIELDS), 2**30, dtype=np.int32)
    room[: len(pieces)] = pieces
    tiles, states, pieces = (torch.from_numpy(part).to(device) for part in (table, states, room))
    return DecodeWork(RowTiles(*tiles.unbind(0)), states, pieces)


@pytest.mark.skipif(MODE is TritonMode.ABSENT, reason="Triton is not installed")
@pytest.mark.parametrize("programs", [1, 7, 24])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("wave", WAVES)
def test_every_piece_is_taken_whoever_takes_it(
    monkeypatch: pytest.MonkeyPatch, wave: str, programs: int, apart: bool
) -> None:
    """Splits as pieces of their own, and as the work has it, against whole contexts, to the bit."""
    monkeypatch.setattr(decode_work, "AT_ONCE", programs * KV_HEADS)
    for device in {lane.device for lane in lanes()}:
        with PoisonedOutputs():
            whole, single, mixed = (
                shared_prefix_attention_triton(
                    *_arguments(device, wave, _work(device, wave, apart=apart, parallel=parallel))
                )
                for parallel in (False, True, None)
            )
        assert torch.equal(single, whole)
        assert torch.equal(mixed, whole)
        cpu = torch.device("cpu")
        expected = shared_prefix_attention(
            *_arguments(cpu, wave, _work(cpu, wave, apart=False, parallel=None), spare=0)
        )
        torch.testing.assert_close(whole.cpu(), expected, rtol=1e-4, atol=1e-5)
