"""The context kernel's programs take pairs of tile and split in turns: however many there are, each pair is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashrec.kernels import decode_attention_triton
from flashrec.kernels._triton import MODE, TritonMode
from flashrec.kernels.decode_attention import shared_prefix_attention
from flashrec.kernels.decode_attention_triton import SPLIT_TOKENS, shared_prefix_attention_triton
from flashrec.kernels.tiles import RowTiles, row_tiles
from flashrec_harness.kernels_suite import lanes

pytestmark = pytest.mark.skipif(MODE is TritonMode.ABSENT, reason="Triton is not installed")
HEADS, KV_HEADS, DIM, PAGE, TILE = 4, 2, 16, 64, 4
LENGTHS = (SPLIT_TOKENS // 2 + 90, 3, SPLIT_TOKENS // 4, 1)
"""Splits of 256: three, one, one, one."""
BEAMS = (6, 9, 1, 5)


def _arguments(device: torch.device, tiles: RowTiles, requests: int) -> tuple[Any, ...]:
    """A wave of four requests in buffers for ``requests``, the rest of which are inert."""
    generator = torch.Generator().manual_seed(3)
    rows, pages = sum(BEAMS), max(LENGTHS) // PAGE + 1
    base = len(LENGTHS) * pages * PAGE
    k, v = (torch.randn(base + 2 * rows, KV_HEADS, DIM, generator=generator).to(device) for _ in range(2))
    q = torch.randn(rows, HEADS, DIM, generator=generator).to(device)
    table = torch.zeros(requests, pages, dtype=torch.int32)
    table[: len(LENGTHS)] = torch.randperm(len(LENGTHS) * pages, generator=generator).view(len(LENGTHS), pages)
    length = torch.tensor([*LENGTHS, *[0] * (requests - len(LENGTHS))], dtype=torch.int32)
    ancestors = torch.arange(2 * rows, dtype=torch.int32).view(2, rows) % rows
    placed = RowTiles(*(part.to(device) for part in tiles))
    head = (q, k, v, table.to(device), PAGE, length.to(device), placed, TILE)
    return (*head, base, rows, 2, ancestors.to(device), DIM**-0.5, 1.0, 1.0)


def _apart(tiles: RowTiles) -> RowTiles:
    """The same tiles with empty ones before, between and behind them."""
    wide = [torch.zeros(3 * len(part) + 2, dtype=torch.int32) for part in tiles]
    for target, part in zip(wide, tiles, strict=True):
        target[1:-1:3] = part
    return RowTiles(*wide)


@pytest.mark.parametrize("programs", [1, 7, 24])
@pytest.mark.parametrize("apart", [False, True])
def test_every_pair_of_tile_and_split_is_attended(monkeypatch: pytest.MonkeyPatch, programs: int, apart: bool) -> None:
    """Eight tiles, of which two have three splits, against a program for each tile, to the bit."""
    monkeypatch.setattr(decode_attention_triton, "AT_ONCE", programs * KV_HEADS)
    tiles = row_tiles(BEAMS, TILE, 12)
    assert int((tiles.rows > 0).sum()) == 8
    for device in {lane.device for lane in lanes()}:
        arguments = _arguments(device, _apart(tiles) if apart else tiles, 5)
        in_turn = shared_prefix_attention_triton(*arguments, across=False)
        across = shared_prefix_attention_triton(*arguments, across=True)
        assert torch.equal(across, in_turn)
        expected = shared_prefix_attention(*_arguments(torch.device("cpu"), tiles, 5))
        torch.testing.assert_close(across.cpu(), expected, rtol=1e-4, atol=1e-5)
