"""Sums, keys and noise of the search, against float64, Python's own order and a pure-Python SplitMix64."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from flashrec.search.numerics import INVALID_KEY, gumbel, log_sum_exp, mix64, order_key

MASK = (1 << 64) - 1
WIDTHS = (1, 2, 3, 7, 15, 16, 17, 31, 33, 100, 257, 1000)
FLOATS = st.floats(width=32, allow_nan=False)
"""Every float32 that is a number, both zeros and both infinities among them."""


@given(
    rows=st.integers(1, 5),
    width=st.sampled_from(WIDTHS),
    scale=st.sampled_from([1e-3, 1.0, 30.0, 1e4]),
    seed=st.integers(0, 99),
)
def test_log_sum_exp_against_float64(rows: int, width: int, scale: float, seed: int) -> None:
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * scale
    wanted = torch.logsumexp(x.double(), -1)
    # Half an ulp of the peak's magnitude, and log2(width) additions of relative error 2**-24.
    bound = 2.0**-23 * (wanted.abs() + math.log2(width) + 3)
    assert ((log_sum_exp(x).double() - wanted).abs() <= bound).all()


def test_log_sum_exp_of_extremes() -> None:
    inf = math.inf
    x = torch.tensor([[-inf, -inf], [-inf, 2.5], [3e38, -3e38], [-3e38, -3e38]])
    assert log_sum_exp(x).tolist() == pytest.approx([-inf, 2.5, 3e38, -3e38])
    assert log_sum_exp(torch.tensor([[math.nan, 0.0]])).isnan().all()


def rows_depend_on_batch(function: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Whether a row's bits differ when other rows stand before or after it."""
    for width in WIDTHS:
        x = torch.randn(37, width, generator=torch.Generator().manual_seed(width))
        whole = function(x)
        for row in range(0, 37, 5):
            alone = function(x[row : row + 1])
            part = function(x[row:])[0]
            if not (whole[row].equal(alone[0]) and whole[row].equal(part)):
                return True
    return False


def test_log_sum_exp_of_a_row_does_not_depend_on_the_others() -> None:
    assert not rows_depend_on_batch(log_sum_exp)


def test_batch_dependence_would_be_seen() -> None:
    def precision_chosen_by_rows(x: torch.Tensor) -> torch.Tensor:
        return log_sum_exp(x) if len(x) == 1 else torch.logsumexp(x.double(), -1).float()

    assert rows_depend_on_batch(precision_chosen_by_rows)


@given(st.lists(FLOATS, min_size=1, max_size=30), st.data())
def test_order_key_sorts_as_python_sorts(scores: list[float], data: st.DataObject) -> None:
    ranks = data.draw(st.lists(st.integers(0, 2**32 - 1), min_size=len(scores), max_size=len(scores), unique=True))
    legal = data.draw(st.lists(st.booleans(), min_size=len(scores), max_size=len(scores)))
    keys = order_key(torch.tensor(scores), torch.tensor(ranks), torch.tensor(legal)).tolist()
    found = sorted(range(len(scores)), key=lambda place: -keys[place])
    wanted = sorted(
        (place for place in range(len(scores)) if legal[place]), key=lambda place: (-scores[place], ranks[place])
    )
    assert found[: len(wanted)] == wanted
    assert all(keys[place] == INVALID_KEY for place in found[len(wanted) :])
    assert len({keys[place] for place in wanted}) == len(wanted)


def test_order_key_ties_and_boundaries() -> None:
    inf = math.inf
    scores = torch.tensor([-0.0, 0.0, -inf, inf, -1e-45, 1e-45, -3.4e38])
    ranks = torch.tensor([1, 0, 5, 6, 2, 3, 2**32 - 1])
    keys = order_key(scores, ranks, torch.ones(7, dtype=torch.bool))
    assert torch.argsort(keys, descending=True).tolist() == [3, 5, 1, 0, 4, 6, 2]
    assert keys.min() > INVALID_KEY


def test_order_key_selects_nan_of_either_sign_first() -> None:
    """A NaN that sorted last would leave a beam out and return the rest as if nothing had happened."""
    bits = torch.tensor([0x3F800000, 0x7FC00000, -0x400000, 0x7F7FFFFF], dtype=torch.int32)
    keys = order_key(bits.view(torch.float32), torch.arange(4), torch.ones(4, dtype=torch.bool))
    assert torch.argsort(keys, descending=True).tolist() == [1, 2, 3, 0]


def splitmix64(x: int) -> int:
    """The output of SplitMix64 for state ``x``, as in Steele, Lea and Flood 2014, figure 16."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20))
def test_mix64_is_splitmix64(values: list[int]) -> None:
    found = mix64(torch.tensor(values)).tolist()
    assert [value & MASK for value in found] == [splitmix64(value & MASK) for value in values]


def test_splitmix64_of_the_published_seed() -> None:
    # First output of the generator seeded with 1234567, as published with its reference implementation.
    assert splitmix64(1234567) == 6457827717110365317


def test_gumbel_has_its_distribution() -> None:
    drawn = gumbel(torch.arange(200_000)).double().numpy()
    assert stats.kstest(drawn, "gumbel_r").pvalue > 0.01
    assert stats.kstest(drawn * 1.02, "gumbel_r").pvalue < 0.01
    # Neighbouring keys are independent.
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.01


def unmix64(x: int) -> int:
    """The state whose SplitMix64 output is ``x``."""

    def unshift(value: int, bits: int) -> int:
        out = value
        for _ in range(64 // bits):
            out = value ^ (out >> bits)
        return out

    x = (unshift(x, 31) * pow(0x94D049BB133111EB, -1, 1 << 64)) & MASK
    x = (unshift(x, 27) * pow(0xBF58476D1CE4E5B9, -1, 1 << 64)) & MASK
    x = unshift(x, 30)
    return (x - 0x9E3779B97F4A7C15) & MASK


def test_gumbel_is_finite_for_the_smallest_and_the_largest_hash() -> None:
    outputs = [0, 1, (1 << 40) - 1, 1 << 63, MASK - (1 << 41), MASK]
    states = [unmix64(value) for value in outputs]
    assert [splitmix64(state) for state in states] == outputs
    signed = [struct.unpack("<q", struct.pack("<Q", state))[0] for state in states]
    drawn = gumbel(torch.tensor(signed))
    assert drawn.isfinite().all()
    assert drawn.argmin() == 0
    assert drawn.argmax() == len(outputs) - 1


def test_gumbel_is_a_pure_function_of_its_key() -> None:
    keys = torch.randint(-(2**62), 2**62, (1000,), generator=torch.Generator().manual_seed(0))
    whole = gumbel(keys)
    assert torch.equal(gumbel(keys.flip(0)).flip(0), whole)
    assert torch.equal(torch.cat([gumbel(keys[start : start + 7]) for start in range(0, 1000, 7)]), whole)
