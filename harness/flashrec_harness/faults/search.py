"""Faults of the arithmetic and of the selection."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from flashrec.batch import Activation, Quantized
from flashrec.kernels import decode_attention, paged_attention, prefill_attention
from flashrec.kernels.ops import Ops
from flashrec.kernels.tiles import RowTiles
from flashrec.layers.linear import Linear
from flashrec.search import expand, numerics
from flashrec.search.expand import Expansion, Frontier, Spans
from flashrec.search.filters import FilterSet
from flashrec.search.levels import Level
from flashrec_harness.faults.registry import fault, parity

_FEW_ROWS = 48


@fault("split-count-from-batch", axis="mixed", tensor="logits")
def split_count_from_batch() -> Iterator[None]:
    """Attention reads K and V in tiles of 32 tokens instead of 64 when the pass has more than four row tiles."""
    real = paged_attention.context_state

    def context_state(*arguments: Any) -> Any:
        rows = next(one for one in arguments if isinstance(one, RowTiles)).rows
        tile = 32 if int((rows > 0).sum()) > 4 else 64
        with mock.patch.object(paged_attention, "KV_TILE", tile):
            return real(*arguments)

    with (
        mock.patch.object(decode_attention, "context_state", context_state),
        mock.patch.object(prefill_attention, "context_state", context_state),
    ):
        yield


@fault("fp8-product-by-rows", axis="fp8", tensor="logits")
def fp8_product_by_rows() -> Iterator[None]:
    """Above 48 rows an FP8 product adds up its inner dimension in two halves."""
    real = Linear.__call__

    def product(self: Linear, x: Activation, ops: Ops) -> torch.Tensor:
        if self.weight_scale is None:
            return real(self, x, ops)
        values, scale = x if isinstance(x, Quantized) else ops.quant_per_token(x)
        if values.shape[0] <= _FEW_ROWS:
            return real(self, Quantized(values, scale), ops)
        middle = values.shape[1] // 2
        halves = [
            ops.linear_fp8(
                values[:, part].contiguous(), scale, self.weight[:, part].contiguous(), self.weight_scale, self.dtype
            )
            for part in (slice(None, middle), slice(middle, None))
        ]
        return torch.add(*halves)

    with mock.patch.object(Linear, "__call__", product):
        yield


@fault("stale-padding-rows", axis="buckets", tensor="parents")
def stale_padding_rows() -> Iterator[None]:
    """A bucket's padding rows keep the candidates of a wave that filled them, and the last request selects from
    them as well."""
    real = expand._select
    left: dict[tuple[int, int], list[Any]] = {}

    def select(level: Level, frontier: Frontier, spans: Spans, *candidates: Any) -> Expansion:
        *fresh, phi = candidates
        rows = len(fresh[0])
        start, count = spans.source[-1]
        if level.index:
            old = left.get((rows, level.index), fresh)
            padding = (torch.arange(rows, device=fresh[0].device) >= start + count).unsqueeze(1)
            fresh = [torch.where(padding, before, now) for before, now in zip(old, fresh, strict=True)]
            left[rows, level.index] = fresh
            spans = replace(spans, source=[*spans.source[:-1], (start, rows - start)])
        child, legal, score, ranked = fresh
        return real(level, frontier, spans, child, legal, score, ranked, phi)

    with mock.patch.object(expand, "_select", select):
        yield


@fault("unseeded-tie-break", axis="ties", tensor="tokens")
def unseeded_tie_break() -> Iterator[None]:
    """Equal scores are ordered by a random number that nobody seeded."""
    source = torch.Generator()
    source.seed()

    def shuffled(rank: torch.Tensor) -> torch.Tensor:
        return torch.randint(0, 2**31, rank.shape, generator=source).to(rank.device)

    with _ranks(shuffled):
        yield


@fault("hash-ordered-ties", axis="ties", tensor="tokens")
def hash_ordered_ties() -> Iterator[None]:
    """Equal scores are ordered by Python's hash of a string: the same in one process, another in the next."""

    def hashed(rank: torch.Tensor) -> torch.Tensor:
        return rank ^ (hash("tie") & 0x1)

    with _ranks(hashed):
        yield


def _ranks(change: Any) -> Any:
    """Patches the rank that :func:`order_key` breaks ties with."""
    real = numerics.order_key

    def order_key(score: torch.Tensor, rank: torch.Tensor, legal: torch.Tensor) -> torch.Tensor:
        return real(score, change(rank), legal)

    return mock.patch("flashrec.search.expand.order_key", order_key)


@fault("noise-by-row", axis="sampling", tensor="tokens")
def noise_by_row() -> Iterator[None]:
    """A sampled request's noise follows from its rows in the wave as well as from its seed."""
    real = expand._perturb

    def perturb(picked: torch.Tensor, score: torch.Tensor, node_keys: torch.Tensor, *rest: Any) -> Any:
        row = torch.arange(len(node_keys), device=node_keys.device).unsqueeze(1)
        return real(picked, score, node_keys ^ row, *rest)

    with mock.patch.object(expand, "_perturb", perturb):
        yield


@fault("allow-list-ignored", parity("sid"), axis="filters")
def allow_list_ignored() -> Iterator[None]:
    """Allow-lists are accepted and dropped in the beam path."""
    real = FilterSet.alive

    def alive(self: FilterSet, *arguments: torch.Tensor) -> torch.Tensor:
        return real(replace(self, allow=torch.zeros_like(self.allow)), *arguments)

    with mock.patch.object(FilterSet, "alive", alive):
        yield


@fault("filters-of-the-first", axis="filters", tensor="parents")
def filters_of_the_first() -> Iterator[None]:
    """Every request of a wave is searched with the lists of its first."""
    real = FilterSet.alive

    def alive(self: FilterSet, request: torch.Tensor, first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        return real(self, torch.zeros_like(request), first, last)

    with mock.patch.object(FilterSet, "alive", alive):
        yield


@fault("duplicated-beam", parity("sid"), axis="mixed", tensor="parents")
def duplicated_beam() -> Iterator[None]:
    """In a wave of more than 40 rows a request's last beam repeats its first."""
    real = expand.expand

    def expanding(logits: torch.Tensor, level: Any, frontier: Frontier, spans: Spans, *arguments: Any) -> Expansion:
        found = real(logits, level, frontier, spans, *arguments)
        if spans.target_rows <= 40:
            return found
        index = torch.arange(spans.target_rows, device=found.parent.device)
        for start, width in spans.target:
            index[start + width - 1] = start
        new = found.frontier
        copied = replace(new, node=new.node[index], score=new.score[index], valid=new.valid[index])
        return replace(found, frontier=copied, parent=found.parent[index], code=found.code[index])

    with mock.patch("flashrec.search.expand.expand", expanding):
        yield
