"""Faults that give the same wrong answer every time: determinism is blind to them, parity must not be."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

from flashrec.runtime import decode
from flashrec.runtime.buffers import DecodeBuffers
from flashrec.runtime.results import WaveBeams
from flashrec_harness.faults.registry import fault, parity

_WIDTH = 8


@fault("parents-off-by-one-at-one-width", parity("sid"))
def parents_off_by_one_at_one_width() -> Iterator[None]:
    """A beam of a request that is 8 wide goes on from the keys and values of the row before its parent."""
    real = decode.reorder_ancestors

    def reorder(buffers: DecodeBuffers, parent: torch.Tensor, stored: int) -> None:
        first, width = buffers.later[:2, buffers.row_request]
        before = torch.maximum(parent - 1, first)
        real(buffers, torch.where(width == _WIDTH, before, parent), stored)

    with mock.patch.object(decode, "reorder_ancestors", reorder):
        yield


@fault("illegal-sid", parity("sid"))
def illegal_sid() -> Iterator[None]:
    """The first answer of every request has its first two tokens exchanged: no semantic ID of any catalog."""
    real: Any = vars(WaveBeams)["_token_ids"]

    def exchanged(self: WaveBeams) -> NDArray[np.int32]:
        tokens: NDArray[np.int32] = real.func(self).copy()
        firsts = [start for start, end in itertools.pairwise([0, *self._ends]) if end > start]
        tokens[firsts, :2] = tokens[firsts, 1::-1]
        return tokens

    spoilt = functools.cached_property(exchanged)
    spoilt.__set_name__(WaveBeams, "_token_ids")
    with mock.patch.object(WaveBeams, "_token_ids", spoilt):
        yield
