"""Causal prefill attention for Hopper and long contexts: a warp fetches keys and values, two warp groups attend.

A row gets the same bits as from :mod:`flashrec.kernels.prefill_attention`. What differs is who waits for what, and that
programs stay and take work as they finish it.

H200, torch 2.11, 2026-12-01, 16/8 heads of 128, one after the other in one run, the Triton kernel / this one in us:
8 x 2,465 496 / 436, 1 x 5,000 212 / 192, 1 x 2,465 63 / 61, 8 x 1,000 104 / 106, 32 x 600 186 / 195, 1 x 303 9 / 12.
"""

from __future__ import annotations

import functools

import torch

from flashrec.kernels._gluon import gl, gluon_jit, hopper, tile_descriptor
from flashrec.kernels._softmax import LOG2E
from flashrec.kernels.paged_attention import KV_TILE
from flashrec.kernels.prefill_attend_gluon import HALF_M, STAGES, M, N, attend
from flashrec.kernels.tiles import TALL_TILE_M, AttentionShape, RowTiles

HEAD_DIM = 128


def unfit(shape: AttentionShape) -> str:
    """Why :func:`paged_prefill_attention_gluon` does not take a pool of this shape; empty if it does."""
    if shape.kv_dtype != torch.bfloat16:
        return f"keys and values are {str(shape.kv_dtype).removeprefix('torch.')}, not bfloat16"
    if shape.head_dim != HEAD_DIM:
        return f"heads of {shape.head_dim}, not {HEAD_DIM}"
    if shape.page_size % KV_TILE:
        return f"pages of {shape.page_size} do not hold whole tiles of {KV_TILE}"
    if HALF_M % (shape.q_heads // shape.kv_heads):
        return f"{shape.q_heads} query heads on {shape.kv_heads} do not divide {HALF_M} rows"
    return ""


def is_tall(shape: AttentionShape, tile_rows: int) -> bool:
    """Whether row tiles of this height are this kernel's."""
    return tile_rows * shape.q_heads == TALL_TILE_M * shape.kv_heads


@gluon_jit
def _hand_over(item: gl.tensor, desk: gl.tuple, turn: gl.tensor) -> None:
    items, item_full, item_empty = desk
    slot = turn % 2
    hopper.mbarrier.wait(item_empty.index(slot), ((turn // 2) & 1) ^ 1)
    items.index(slot).store(gl.full([1], item, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    hopper.mbarrier.arrive(item_full.index(slot), count=1)


@gluon_jit
def _fetch(
    taken: gl.tensor,
    k_tiles: gl.tensor,
    v_tiles: gl.tensor,
    contexts: gl.tuple,
    work: gl.tuple,
    ring: gl.tuple,
    desk: gl.tuple,
    KV_HEADS: gl.constexpr,
    D: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
) -> None:
    """The fetching warp: takes work, says which, and keeps the ring of key and value tiles full."""
    page_table, page_stride, kv_len, positions = contexts
    tile_request, tile_row0, tile_rows, num_tiles = work
    k_ring, v_ring, full, empty = ring
    step = 0
    turn = 0
    item = gl.program_id(0)
    while item < num_tiles * KV_HEADS:
        _hand_over(item, desk, turn)
        turn += 1
        kv_head = item % KV_HEADS
        tile = num_tiles - 1 - item // KV_HEADS
        live = gl.load(tile_rows + tile)
        if live > 0:
            request = gl.load(tile_request + tile)
            last = gl.load(positions + gl.load(tile_row0 + tile) + live - 1) + 1
            tiles = (gl.minimum(last, gl.load(kv_len + request)) + N - 1) // N
            for i in range(tiles):
                stage = (step + i) % STAGES
                page = gl.load(page_table + request * page_stride + i * N // PAGE_SIZE)
                slot = page * PAGE_SIZE + i * N % PAGE_SIZE
                hopper.mbarrier.wait(empty.index(stage), (((step + i) // STAGES) & 1) ^ 1)
                hopper.mbarrier.expect(full.index(stage), 2 * N * D * 2)
                corner = [slot, kv_head * D]
                hopper.tma.async_copy_global_to_shared(k_tiles, corner, full.index(stage), k_ring.index(stage))
                hopper.tma.async_copy_global_to_shared(v_tiles, corner, full.index(stage), v_ring.index(stage))
            step += tiles
        item = gl.num_programs(0) + gl.atomic_add(taken, 1)
    _hand_over(item, desk, turn)


@functools.partial(gluon_jit, varying=("page_stride", "num_tiles"))
def _prefill_kernel(
    taken: gl.tensor,
    q: gl.tensor,
    k_tiles: gl.tensor,
    v_tiles: gl.tensor,
    v_cache: gl.tensor,
    page_table: gl.tensor,
    page_stride: gl.tensor,
    kv_len: gl.tensor,
    positions: gl.tensor,
    tile_request: gl.tensor,
    tile_row0: gl.tensor,
    tile_rows: gl.tensor,
    num_tiles: gl.tensor,
    out: gl.tensor,
    slot_stride: gl.tensor,
    log2_scale: gl.tensor,
    Q_HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    D: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
) -> None:
    """Takes one K/V head x row tile after another; late tiles, which see most, first. ``q``, ``out`` [T, hq, D].

    ``taken``: int32 [1], zero; counts what was taken beyond each program's first.
    """
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, D], gl.bfloat16)
    k_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, N, D], tile)
    v_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, N, D], tile)
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [2, M, D], tile)
    items = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    item_full = gl.allocate_shared_memory(gl.int64, [2, 1], hopper.mbarrier.MBarrierLayout())
    item_empty = gl.allocate_shared_memory(gl.int64, [2, 1], hopper.mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(stage), count=1)
        hopper.mbarrier.init(empty.index(stage), count=2)
    for slot in gl.static_range(2):
        hopper.mbarrier.init(item_full.index(slot), count=1)
        hopper.mbarrier.init(item_empty.index(slot), count=2)
    contexts = (page_table, page_stride, kv_len, positions)
    work = (tile_request, tile_row0, tile_rows, num_tiles)
    ring = (k_ring, v_ring, full, empty)
    desk = (items, item_full, item_empty)
    tensors = (q, out, v_cache, q_smem)
    gl.warp_specialize(
        [
            (
                attend,
                (0, tensors, slot_stride, log2_scale, contexts, work, ring, desk, Q_HEADS, KV_HEADS, D, PAGE_SIZE),
            ),
            (
                attend,
                (1, tensors, slot_stride, log2_scale, contexts, work, ring, desk, Q_HEADS, KV_HEADS, D, PAGE_SIZE),
            ),
            (_fetch, (taken, k_tiles, v_tiles, contexts, work, ring, desk, KV_HEADS, D, PAGE_SIZE)),
        ],
        [4, 1],
        [232, 40],
    )


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """How many programs run at a time, one each; on a CPU nothing is launched, only compiled."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def paged_prefill_attention_gluon(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    kv_len: torch.Tensor,
    positions: torch.Tensor,
    tiles: RowTiles,
    tile_rows: int,
    scale: float,
    k_scale: float,
    v_scale: float,
) -> torch.Tensor:
    """:func:`flashrec.kernels.prefill_attention.paged_prefill_attention` for contiguous bf16 operands and tall tiles.

    Raises ``ValueError`` for what is :func:`unfit`.
    """
    shape = AttentionShape(q.shape[1], k_cache.shape[1], q.shape[2], page_size, k_cache.dtype)
    reason = unfit(shape) or ("" if is_tall(shape, tile_rows) else f"tiles of {tile_rows} rows")
    if reason or q.dtype != torch.bfloat16:
        raise ValueError(f"prefill attention: {reason or f'queries in {q.dtype}'}; take the Triton kernel for it")
    slots, kv_heads, head_dim = k_cache.shape
    out = torch.empty_like(q)
    work = kv_heads * tiles.rows.shape[0]
    if work:
        k_tiles, v_tiles = (
            tile_descriptor(cache.view(slots, kv_heads * head_dim), KV_TILE, head_dim) for cache in (k_cache, v_cache)
        )
        _prefill_kernel[(min(work, _multiprocessors(q.device)),)](
            torch.zeros(1, dtype=torch.int32, device=q.device),
            q,
            k_tiles,
            v_tiles,
            v_cache,
            page_table,
            page_table.stride(0),
            kv_len,
            positions,
            *tiles,
            tiles.rows.shape[0],
            out,
            k_cache.stride(0),
            scale * LOG2E,
            Q_HEADS=q.shape[1],
            KV_HEADS=kv_heads,
            D=head_dim,
            PAGE_SIZE=page_size,
            num_warps=4,
        )
    return out
