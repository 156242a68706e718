"""Cases of both attention kernels over a paged pool whose unused slots hold NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from flashrec.kernels.decode_work import SPLIT_TOKENS, decode_work
from flashrec.kernels.registry import GLUON, TRITON
from flashrec.kernels.tiles import TALL_TILE_M, TILE_M, RowTiles, count_row_tiles, row_tiles, rows_per_tile
from flashrec_harness.guarded import poison_
from flashrec_harness.kernel_cases.base import (
    NO_GLUON,
    Argument,
    Collect,
    Draws,
    KernelCase,
    Lane,
    Output,
    draws,
    exact,
    has_gluon,
)
from flashrec_harness.kernel_cases.pointwise import code_outputs

_CPU_HEADS = ((2, 1, 16), (4, 2, 16), (6, 2, 24), (3, 3, 8))
_GPU_HEADS = ((16, 8, 128), (6, 1, 64))
_CPU_LENGTHS = (1, 5, 63, 64, 65, 130, SPLIT_TOKENS // 4 + 1)
_SPLIT_EDGES = tuple(
    edge + more
    for edge in (SPLIT_TOKENS // 4, SPLIT_TOKENS // 2, SPLIT_TOKENS, SPLIT_TOKENS * 3 // 2, 4 * SPLIT_TOKENS)
    for more in (0, 1)
)
_GPU_LENGTHS = (1, 63, 64, 65, 303, SPLIT_TOKENS - 1, *_SPLIT_EDGES, SPLIT_TOKENS + 300)
_PREFILL_LENGTHS = tuple(length for length in _GPU_LENGTHS if length < 2 * SPLIT_TOKENS)
_PAGES = (16, 64)
ROUNDING_OF_A_SUM = 2.0**-8
"""Of a row's largest output: what the float rule grants, twice half a bf16 step. Near zero it is many FP8 codes."""


@dataclass(frozen=True, slots=True)
class Pool:
    """One layer's pool with pages for each request handed out at random, and slots for beams after them."""

    k: torch.Tensor
    v: torch.Tensor
    page_table: torch.Tensor
    page_size: int
    beam_base: int

    def slots(self, request: int, length: int) -> torch.Tensor:
        position = torch.arange(length, device=self.k.device)
        return self.page_table[request].long()[position // self.page_size] * self.page_size + (
            position % self.page_size
        )


def _pool(
    data: Draws, lengths: Sequence[int], page_size: int, heads: int, dim: int, beam_slots: int, fp8: bool
) -> Pool:
    """Fills the slots that the lengths cover; every other one stays NaN, page 0, the scratch page, too."""
    pages = max(-(-n // page_size) for n in lengths) + 1
    table = data.permutation(len(lengths) * pages).reshape(len(lengths), pages).int() + 1
    base = (len(lengths) * pages + 1) * page_size
    dtype = torch.float8_e4m3fn if fp8 else data.lane.dtype
    k, v = (poison_(torch.empty(base + beam_slots, heads, dim, dtype=dtype, device=data.lane.device)) for _ in range(2))
    pool = Pool(k, v, table, page_size, base)
    for request, length in enumerate(lengths):
        _fill(data, pool, pool.slots(request, length))
    return pool


def _fill(data: Draws, pool: Pool, slots: torch.Tensor) -> None:
    heads, dim = pool.k.shape[1:]
    for cache in (pool.k, pool.v):
        values = data.normal(len(slots), heads, dim).to(cache.dtype)
        if cache.dtype.itemsize == 1:
            cache.view(torch.uint8)[slots] = values.view(torch.uint8)
        else:
            cache[slots] = values


def _dequantised(cache: torch.Tensor, scale: float) -> torch.Tensor:
    return cache.double() * (scale if cache.dtype.itemsize == 1 else 1.0)


def _tiles(rows: Sequence[int], tile: int, device: torch.device) -> RowTiles:
    """The tiles of ``rows`` with two inert ones after them."""
    table = row_tiles(rows, tile, count_row_tiles(rows, tile) + 2)
    return RowTiles(*(part.to(device) for part in table))


def _common(
    draw: st.DrawFn, lane: Lane, *, tall: bool = False
) -> tuple[Draws, int, int, int, int, bool, tuple[float, float]]:
    data = draw(draws(lane))
    if tall:
        return data, *_GPU_HEADS[0], _PAGES[-1], False, (1.0, 1.0)
    q_heads, kv_heads, dim = draw(st.sampled_from(_GPU_HEADS if lane.compiled else _CPU_HEADS))
    fp8 = lane.compiled and draw(st.booleans())
    kv_scales = draw(st.sampled_from([(1.0, 1.0), (0.5, 0.25)])) if fp8 else (1.0, 1.0)
    return data, q_heads, kv_heads, dim, draw(st.sampled_from(_PAGES)), fp8, kv_scales


def _unfit(lane: Lane) -> dict[str, str]:
    if lane.compiled and lane.dtype == torch.float32:
        return {TRITON: "on a GPU float32 attention runs the reference"}
    return {}


def _unfit_prefill(lane: Lane, tall: bool) -> dict[str, str]:
    if tall:
        return {TRITON: "tall tiles are the Gluon kernel's"}
    return _unfit(lane) | {GLUON: "short tiles are the Triton kernel's" if has_gluon(lane) else NO_GLUON}


def _covered(lane: Lane, rows: int, *, codes: bool) -> Collect:
    """Only rows that a tile covers are specified."""

    def collect(result: Any, _: Sequence[Any]) -> list[Output]:
        if codes:
            return code_outputs(result[0][:rows], result[1][:rows], lane, slack=ROUNDING_OF_A_SUM)
        return [Output("out", result[:rows])]

    return collect


def _decode_case(draw: st.DrawFn, lane: Lane, codes: bool) -> KernelCase:
    data, q_heads, kv_heads, dim, page_size, fp8, (k_scale, v_scale) = _common(draw, lane)
    lengths = draw(st.lists(lane.pick(_CPU_LENGTHS, _GPU_LENGTHS), min_size=1, max_size=4 if lane.compiled else 2))
    beams = [draw(lane.pick((1, 2, 5, 17), (1, 2, 50, 65))) for _ in lengths]
    step = draw(st.integers(0, 5))
    rows, spare = sum(beams), draw(st.integers(0, 3))
    capacity = rows + spare
    pool = _pool(data, lengths, page_size, kv_heads, dim, 5 * capacity, fp8)
    q = data.normal(capacity, q_heads, dim)
    ancestors = data.integers(5, capacity, high=rows).int()
    for j in range(step):
        _fill(data, pool, pool.beam_base + j * capacity + torch.arange(rows, device=lane.device))
    tile = rows_per_tile(q_heads, kv_heads)
    parallel = draw(st.sampled_from([None, True, False]))
    work = decode_work(beams, lengths, tile, kv_heads, spare=2, parallel=parallel, device=lane.device)
    ctx_len = torch.tensor(lengths, dtype=torch.int32, device=lane.device)
    middle = (tile, pool.beam_base, capacity, step)
    scale = dim**-0.5
    return KernelCase(
        f"contexts {lengths}, beams {beams}, step {step}, pages of {page_size}, "
        f"{q_heads}/{kv_heads} heads of {dim}, fp8 cache {fp8}, parallel splits {parallel}",
        (
            Argument(q),
            Argument(pool.k),
            Argument(pool.v),
            Argument(pool.page_table),
            page_size,
            Argument(ctx_len),
            work,
            *middle,
            Argument(ancestors),
            scale,
            k_scale,
            v_scale,
        ),
        (
            exact(q),
            _dequantised(pool.k, k_scale),
            _dequantised(pool.v, v_scale),
            pool.page_table,
            page_size,
            ctx_len,
            work,
            *middle,
            ancestors,
            scale,
            1.0,
            1.0,
        ),
        _covered(lane, rows, codes=codes),
        _unfit(lane),
    )


@st.composite
def decode_cases(draw: st.DrawFn, lane: Lane) -> KernelCase:
    """:func:`flashrec.kernels.decode_attention.shared_prefix_attention`."""
    return _decode_case(draw, lane, codes=False)


@st.composite
def decode_quant_cases(draw: st.DrawFn, lane: Lane) -> KernelCase:
    """:func:`flashrec.kernels.decode_attention.shared_prefix_attention_quant`."""
    return _decode_case(draw, lane, codes=True)


@st.composite
def prefill_cases(draw: st.DrawFn, lane: Lane) -> KernelCase:
    """:func:`flashrec.kernels.prefill_attention.paged_prefill_attention`: cached prefixes, tiles of both heights."""
    tall = has_gluon(lane) and draw(st.booleans())
    data, q_heads, kv_heads, dim, page_size, fp8, (k_scale, v_scale) = _common(draw, lane, tall=tall)
    lengths = draw(st.lists(lane.pick(_CPU_LENGTHS, _PREFILL_LENGTHS), min_size=1, max_size=4 if lane.compiled else 2))
    cached = [draw(st.sampled_from(sorted({0, n // 2, n - 1}))) for n in lengths]
    fresh = [n - prefix for n, prefix in zip(lengths, cached, strict=True)]
    rows, spare = sum(fresh), draw(st.integers(0, 2))
    pool = _pool(data, lengths, page_size, kv_heads, dim, 0, fp8)
    q = data.normal(rows + spare, q_heads, dim)
    spans = [torch.arange(prefix, n) for prefix, n in zip(cached, lengths, strict=True)]
    positions = torch.cat([*spans, torch.zeros(spare)]).int().to(lane.device)
    tile = rows_per_tile(q_heads, kv_heads, TALL_TILE_M if tall else TILE_M)
    tiles = _tiles(fresh, tile, lane.device)
    kv_len = torch.tensor(lengths, dtype=torch.int32, device=lane.device)
    scale = dim**-0.5
    return KernelCase(
        f"lengths {lengths}, cached {cached}, pages of {page_size}, {q_heads}/{kv_heads} heads of {dim}, "
        f"fp8 cache {fp8}, tiles of {tile} rows",
        (
            Argument(q),
            Argument(pool.k),
            Argument(pool.v),
            Argument(pool.page_table),
            page_size,
            Argument(kv_len),
            Argument(positions),
            tiles,
            tile,
            scale,
            k_scale,
            v_scale,
        ),
        (
            exact(q),
            _dequantised(pool.k, k_scale),
            _dequantised(pool.v, v_scale),
            pool.page_table,
            page_size,
            kv_len,
            positions,
            tiles,
            tile,
            scale,
            1.0,
            1.0,
        ),
        _covered(lane, rows, codes=False),
        _unfit_prefill(lane, tall),
    )
