"""What goes to the device together, and host blocks of results: used again, never by two results at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flashrec.transfer import ReadBack, upload_together


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


def test_arrays_go_together_and_stand_apart() -> None:
    arrays = [np.arange(6, dtype=np.int32).reshape(2, 3), np.array([7], dtype=np.int32), np.empty(0, dtype=np.int32)]
    arrays.append(np.arange(40, dtype=np.int32))
    copies = upload_together(arrays, torch.device("cpu"))
    for array, copy in zip(arrays, copies, strict=True):
        assert np.array_equal(copy.numpy(), array)
        assert copy.is_contiguous()
        assert (copy.data_ptr() - copies[0].data_ptr()) % 64 == 0
