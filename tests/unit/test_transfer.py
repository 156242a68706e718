"""What goes to the device together, and the host memory that it goes from."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch

from flashrec.transfer import stock_pinned_memory, upload_together


def test_the_stock_has_blocks_of_every_size_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned memory takes a GPU: what is asked for is looked at here, and that all of it is held together."""
    alive: list[weakref.ref[torch.Tensor]] = []
    real = torch.empty

    def empty(size: int, **options: Any) -> torch.Tensor:
        assert options == {"dtype": torch.uint8, "pin_memory": True}
        assert all(one() is not None for one in alive)
        block = real(size, dtype=torch.uint8)
        alive.append(weakref.ref(block))
        return block

    monkeypatch.setattr(torch, "empty", empty)
    stock_pinned_memory(100, 2)
    assert len(alive) == 2 * len((4, 8, 16, 32, 64, 128))
    assert all(one() is None for one in alive)


def test_arrays_go_together_and_stand_apart() -> None:
    arrays = [np.arange(6, dtype=np.int32).reshape(2, 3), np.array([7], dtype=np.int32), np.empty(0, dtype=np.int32)]
    arrays.append(np.arange(40, dtype=np.int32))
    copies = upload_together(arrays, torch.device("cpu"))
    for array, copy in zip(arrays, copies, strict=True):
        assert np.array_equal(copy.numpy(), array)
        assert copy.is_contiguous()
        assert (copy.data_ptr() - copies[0].data_ptr()) % 64 == 0
