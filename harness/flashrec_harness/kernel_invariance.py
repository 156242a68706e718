"""Row invariance: a row's bits do not depend on how many rows stand beside it, nor where it stands (SPEC R1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch

from flashrec.kernels.decode_attention_triton import shared_prefix_attention_triton
from flashrec.kernels.decode_work import SPLIT_TOKENS, decode_work
from flashrec.kernels.gemm import linear_triton
from flashrec.kernels.linear import configure_cublas, linear, linear_cublas, linear_fp8
from flashrec.kernels.ops import by_size
from flashrec.kernels.prefill_attention import paged_prefill_attention, paged_prefill_attention_triton
from flashrec.kernels.prefill_attention_gluon import paged_prefill_attention_gluon
from flashrec.kernels.registry import GLUON, REGISTRY, SCALED_MM, TRITON
from flashrec.kernels.tiles import TALL_TILE_M, TILE_M, RowTiles, row_tiles, rows_per_tile
from flashrec_harness.kernel_cases.base import Draws, Lane, has_gluon
from flashrec_harness.kernel_cases.pointwise import random_fp8
from flashrec_harness.outcome import Check, Outcome

SUITE = "kernel"
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Rows = Callable[[slice], torch.Tensor]
"""Computes some rows of a product on their own."""

_GPU_WEIGHTS = ((2048, 2048), (4096, 2048), (12288, 2048), (2048, 6144))
_GPU_BATCHES = (1, 7, 8, 16, 17, 50, 64, 65, 128, 129, 200, 400, 512, 1000, 1600, 2048)
_CPU_WEIGHTS = ((130, 64), (48, 257))
_CPU_BATCHES = (1, 2, 3, 11, 12, 15, 16, 17, 33, 64)


def rows_that_differ(call: Rows, whole: torch.Tensor, batches: Sequence[int]) -> list[str]:
    """Compares the first and the last ``m`` rows, computed alone, with the same rows of ``whole``."""
    total = whole.shape[0]
    spans = [span for m in batches for span in (slice(0, m), slice(total - m, total))]
    return [
        f"M {span.stop - span.start} at row {span.start}" for span in spans if not torch.equal(call(span), whole[span])
    ]


def _data(lane: Lane) -> Draws:
    return Draws(lane, torch.Generator().manual_seed(20261129))


def _products(lane: Lane) -> dict[str, Product]:
    if not lane.compiled:
        return {"linear (torch)": linear}
    products: dict[str, Product] = {"linear (triton)": linear_triton}
    return products | ({"linear (cublaslt)": linear_cublas} if lane.dtype == torch.bfloat16 else {})


def _fp8_products(lane: Lane) -> dict[str, Callable[..., torch.Tensor]]:
    if not lane.compiled:
        return {"linear_fp8 (torch)": linear_fp8}
    if lane.dtype == torch.float32:
        return {}
    kernels = REGISTRY["linear_fp8"].implementations
    small = GLUON if has_gluon(lane) else TRITON
    products = {f"linear_fp8 ({name})": kernels[name] for name in dict.fromkeys((TRITON, small, SCALED_MM))}
    return products | {"linear_fp8 (by size)": by_size(kernels[small], kernels[SCALED_MM])}


def _judge_products(lane: Lane) -> dict[str, list[str]]:
    """Differences by product name, over this lane's weights and batches."""
    data = _data(lane)
    weights, batches = (_GPU_WEIGHTS, _GPU_BATCHES) if lane.compiled else (_CPU_WEIGHTS, _CPU_BATCHES)
    total = max(batches) + 1
    found: dict[str, list[str]] = {name: [] for name in (*_products(lane), *_fp8_products(lane))}
    for outs, size in weights:
        x, w = data.normal(total, size), data.normal(outs, size, scale=size**-0.5)
        calls = {name: _rows_of(product, x, w) for name, product in _products(lane).items()}
        codes, scale = random_fp8(data, total, size)
        w_codes, w_scale = random_fp8(data, outs, size)
        for name, scaled in _fp8_products(lane).items():
            calls[name] = _scaled_rows_of(scaled, codes, scale, w_codes, w_scale.squeeze(-1), lane.dtype)
        for name, call in calls.items():
            different = rows_that_differ(call, call(slice(0, total)), batches)
            found[name] += [f"N {outs}, K {size}: {place}" for place in different]
    return found


def _rows_of(product: Product, x: torch.Tensor, w: torch.Tensor) -> Rows:
    return lambda rows: product(x[rows], w)


def _scaled_rows_of(
    product: Callable[..., torch.Tensor],
    codes: torch.Tensor,
    scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    dtype: torch.dtype,
) -> Rows:
    return lambda rows: product(codes[rows], scale[rows], w, w_scale, dtype)


def _tiles(rows: Sequence[int], tile: int, device: torch.device) -> RowTiles:
    return RowTiles(*(part.to(device) for part in row_tiles(rows, tile)))


def _judge_decode(lane: Lane) -> list[str]:
    """A request alone and in a mixed wave, splits in parallel and in turn."""
    data = _data(lane)
    heads, kv_heads, dim = (16, 8, 128) if lane.compiled else (2, 1, 16)
    lengths = [2 * SPLIT_TOKENS + 77, 65, *([4 * SPLIT_TOKENS + 9, 1000, 257] if lane.compiled else [600])]
    beams = [50, 7, 1, 40, 5] if lane.compiled else [9, 5, 1]
    pages = max(lengths) // 64 + 1
    rows, base = sum(beams), (len(lengths) * pages + 1) * 64
    k, v = (data.normal(base + 2 * rows, kv_heads, dim) for _ in range(2))
    table = data.permutation(len(lengths) * pages).reshape(len(lengths), pages).int() + 1
    q, ancestors = data.normal(rows, heads, dim), data.integers(2, rows, high=rows).int()
    tile = rows_per_tile(heads, kv_heads)
    length = torch.tensor(lengths, dtype=torch.int32, device=lane.device)

    def call(requests: slice, part: slice, parallel: bool | None) -> torch.Tensor:
        cut = (beams[requests], lengths[requests], tile, kv_heads)
        work = decode_work(*cut, parallel=parallel, device=lane.device)
        own = ancestors[:, part].contiguous()
        return shared_prefix_attention_triton(
            q[part].contiguous(), k, v, table[requests].contiguous(), 64, length[requests].contiguous(), work,
            tile, base, rows, 2, own, dim**-0.5, 1.0, 1.0,
        )  # fmt: skip

    everything = slice(0, len(lengths))
    whole = call(everything, slice(0, rows), True)
    cuts = {"splits in turn": False, "splits as the work has it": None}
    different = [how for how, cut in cuts.items() if not torch.equal(call(everything, slice(0, rows), cut), whole)]
    starts = np.cumsum([0, *beams])
    for request, (start, end) in enumerate(pairwise(starts)):
        for parallel in (True, False):
            alone = call(slice(request, request + 1), slice(start, end), parallel)
            if not torch.equal(alone, whole[start:end]):
                different.append(f"request {request} alone, parallel splits {parallel}")
    return different


def _judge_prefill(lane: Lane) -> dict[str, list[str]]:
    """A cold prefill and a warm one, cached prefixes of several lengths."""
    data = _data(lane)
    heads, kv_heads, dim = (16, 8, 128) if lane.compiled else (2, 1, 16)
    length = 1003 if lane.compiled else 203
    pages = length // 64 + 1
    k, v = (data.normal((pages + 1) * 64, kv_heads, dim) for _ in range(2))
    table = data.permutation(pages).reshape(1, pages).int() + 1
    q = data.normal(length, heads, dim)
    position = torch.arange(length, dtype=torch.int32, device=lane.device)
    kv_len = torch.tensor([length], dtype=torch.int32, device=lane.device)
    kernels = {"triton": (paged_prefill_attention_triton, TILE_M)}
    if not lane.compiled:
        kernels["torch"] = (paged_prefill_attention, TILE_M)
    elif torch.cuda.get_device_capability(lane.device) == (9, 0):
        kernels["gluon"] = (paged_prefill_attention_gluon, TALL_TILE_M)
    found: dict[str, list[str]] = {}
    whole: dict[str, torch.Tensor] = {}
    for name, (kernel, tile_m) in kernels.items():
        tile = rows_per_tile(heads, kv_heads, tile_m)

        def call(cached: int, kernel: Callable[..., torch.Tensor] = kernel, tile: int = tile) -> torch.Tensor:
            tiles = _tiles([length - cached], tile, lane.device)
            part = (q[cached:].contiguous(), k, v, table, 64, kv_len, position[cached:].contiguous())
            return kernel(*part, tiles, tile, dim**-0.5, 1.0, 1.0)

        cold = whole[name] = call(0)
        different = [f"{n} cached" for n in (1, 63, 64, 100, length - 1) if not torch.equal(call(n), cold[n:])]
        found[f"paged_prefill_attention ({name})"] = different
    if "gluon" in whole and not torch.equal(whole["gluon"], whole["triton"]):
        found["paged_prefill_attention (gluon)"].append("other bits than triton")
    return found


def run(lanes: Sequence[Lane]) -> list[Check]:
    """One check for each kernel whose rows must not see their neighbours, on each lane."""
    checks = []
    for lane in lanes:
        if lane.compiled:
            configure_cublas()
        found = _judge_products(lane)
        if not lane.compiled or lane.dtype == torch.bfloat16:  # on a GPU float32 attention has no kernel
            found |= _judge_prefill(lane)
            found["shared_prefix_attention (triton)"] = _judge_decode(lane)
        dtype = str(lane.dtype).removeprefix("torch.")
        for name, different in found.items():
            title = f"row invariance: {name}, {dtype}, {lane.device.type}"
            outcome = Outcome.FAIL if different else Outcome.PASS
            summary = "rows alone, in other batches and at other places: the same bits"
            reason = f"{len(different)} differ: {'; '.join(different[:5])}" if different else ""
            checks.append(Check(SUITE, title, outcome, summary, reason=reason, repeat="flashrec-harness kernel"))
    return checks
