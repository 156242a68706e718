"""Sums and keys whose bits do not depend on what else is in the batch."""

from __future__ import annotations

import torch

INVALID_KEY = torch.iinfo(torch.int64).min
_MIX = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)


def log_sum_exp(x: torch.Tensor) -> torch.Tensor:
    """``log(sum(exp(x)))`` over the last axis of float32 [N, W], with one fixed order of additions.

    The terms are added by halves of a power of two, elementwise, so no library reduction can choose another
    order for another N. A row of -inf gives -inf.
    """
    peak = x.amax(-1, keepdim=True)
    peak = torch.where(peak == -torch.inf, torch.zeros_like(peak), peak)
    width = max(16, 1 << (x.shape[-1] - 1).bit_length())
    terms = torch.zeros(*x.shape[:-1], width, device=x.device)
    terms[..., : x.shape[-1]] = torch.exp(x - peak)
    while terms.shape[-1] > 1:
        half = terms.shape[-1] // 2
        terms = terms[..., :half] + terms[..., half:]
    return (peak + terms.log()).squeeze(-1)


def order_key(score: torch.Tensor, rank: torch.Tensor, legal: torch.Tensor) -> torch.Tensor:
    """int64 keys whose descending order is: higher ``score``, then lower ``rank`` (int64, below 2**32).

    Keys of legal candidates are distinct where their ranks are, so any sort gives the same order (SPEC B2);
    illegal ones get :data:`INVALID_KEY`. Scores are float32; -0.0 counts as 0.0, and a NaN of either sign as
    the largest score: it is selected, and so fails its request, instead of dropping out unseen.
    """
    bits = torch.where(score.isnan(), torch.inf, score + 0.0).view(torch.int32)
    # Flipping the magnitude of negative floats makes their integer order their numeric order.
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    key = (ordered << 32) | (0xFFFFFFFF - rank)
    return torch.where(legal, key, INVALID_KEY)


def mix64(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser (Steele et al. 2014) on int64, with wrapping arithmetic: a hash of integers."""
    x = x + _MIX[0]
    x = (x ^ _logical_shift(x, 30)) * _MIX[1]
    x = (x ^ _logical_shift(x, 27)) * _MIX[2]
    return x ^ _logical_shift(x, 31)


def _logical_shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def gumbel(key: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32 and finite, a pure function of the int64 ``key``."""
    # 23 bits and a half are exact in float32; with 24 the largest would round to 1, whose noise is infinite.
    uniform = (_logical_shift(mix64(key), 41).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))
