"""Host blocks of results: used again, never by two results at once."""

from __future__ import annotations

import pytest
import torch

from flashrec.transfer import ReadBack


@pytest.fixture
def read_back(monkeypatch: pytest.MonkeyPatch) -> ReadBack:
    """Two blocks of twelve, of plain memory: pinned memory takes a GPU."""
    monkeypatch.setattr(ReadBack, "_new", lambda self: torch.full((self._size,), -1, dtype=torch.int32))
    return ReadBack(12, 2)


def _result(start: int) -> torch.Tensor:
    return torch.arange(start, start + 6, dtype=torch.int32).view(3, 2)


def test_results_on_their_way_at_once_stand_apart(read_back: ReadBack) -> None:
    copies = [read_back.take(_result(start)) for start in (0, 10, 20)]
    for start, copy in zip((0, 10, 20), copies, strict=True):
        assert copy.is_contiguous()
        assert torch.equal(copy, _result(start))


def test_a_block_given_back_is_used_again_whole(read_back: ReadBack) -> None:
    first, second = read_back.take(_result(0)), read_back.take(_result(10))
    place = first.data_ptr()
    read_back.give(first)
    whole = read_back.take(torch.arange(12, dtype=torch.int32).view(3, 4))
    assert whole.data_ptr() == place
    assert whole.shape == (3, 4)
    assert torch.equal(second, _result(10))


def test_blocks_do_not_pile_up(read_back: ReadBack) -> None:
    places = set()
    for start in range(20):
        copy = read_back.take(_result(start))
        places.add(copy.data_ptr())
        read_back.give(copy)
    assert len(places) == 1
