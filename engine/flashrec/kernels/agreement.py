"""Do two implementations give a row the same bits? Asked of the device, at construction."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from flashrec.kernels.gemm_plan import is_small, plan_gemm
from flashrec.kernels.quantize import quant_per_token, quantize_weight
from flashrec.kernels.tiles import TALL_TILE_M, TILE_M, AttentionShape, RowTiles, row_tiles, rows_per_tile

Product = Callable[..., torch.Tensor]

ROWS = (1, 8, 32, 50, 128, 192, 256, 320, 384, 385, 512, 1001, 2048, 4096)
"""Rows that any two products are tried on."""


def rows_to_try(outs: int, itemsize: int) -> list[int]:
    """:data:`ROWS`, and as many of every kind of tile that a small product of ``outs`` outputs is given."""
    kinds = {plan_gemm(rows, outs, itemsize): rows for rows in range(1, ROWS[-1]) if is_small(rows, outs)}
    return sorted({*ROWS, *kinds.values()})


def first_difference(
    one: Product, other: Product, weights: Sequence[tuple[int, int]], device: torch.device, *, fp8: bool
) -> str | None:
    """Where ``one`` or ``other`` differs in a bit from ``one`` on :data:`ROWS`'s last, or ``None``.

    ``weights`` are (outputs, inputs) of the products to try, on random bf16 rows, quantised for ``fp8``.
    """
    generator = torch.Generator(device).manual_seed(1)

    def normal(rows: int, size: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(rows, size, generator=generator, device=device) * scale).bfloat16()

    for outs, size in sorted(set(weights)):
        x, w = normal(ROWS[-1], size), normal(outs, size, size**-0.5)
        rows, columns = (quant_per_token(x), quantize_weight(w)) if fp8 else ((x,), (w,))
        rest = (*columns, torch.bfloat16) if fp8 else columns
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # a product may read a weight before the kernel launched last has ended
        whole = one(*rows, *rest)
        for count in rows_to_try(outs, 1 if fp8 else 2):
            for product in (one, other):
                if not torch.equal(product(*(part[:count] for part in rows), *rest), whole[:count]):
                    return f"{count} rows of a [{outs}, {size}] weight"
    return None


def gluon_difference(
    gluon: Product, library: Product, weights: Sequence[tuple[int, int]], device: torch.device
) -> str | None:
    """Where Gluon's FP8 product gives other bits than the library's, or why it cannot be tried here, or ``None``."""
    try:
        different = first_difference(gluon, library, weights, device, fp8=True)
    except Exception as error:
        return _unusable(error)
    return None if different is None else f"other bits for {different}"


def _unusable(error: Exception) -> str:
    """Gluon is experimental: another Triton's compiler may refuse it in any way."""
    return f"it does not run here ({type(error).__name__}: {' '.join(str(error).split())[:200]})"


PROMPTS = ((0, 2500), (1000, 1131), (0, 64), (700, 701))
"""Cached and whole length of the prompts that the prefill kernels are tried on."""


def prefill_difference(tall: Product, short: Product, shape: AttentionShape, device: torch.device) -> str | None:
    """Where a kernel for tall tiles gives a row other bits than one for short tiles, or why it cannot be tried here, or
    ``None``."""
    generator = torch.Generator(device).manual_seed(1)
    pages = -(-max(length for _, length in PROMPTS) // shape.page_size)

    def normal(rows: int, heads: int) -> torch.Tensor:
        return torch.randn(rows, heads, shape.head_dim, generator=generator, device=device).bfloat16()

    k, v = (normal(len(PROMPTS) * pages * shape.page_size, shape.kv_heads) for _ in range(2))
    table = torch.arange(len(PROMPTS) * pages, dtype=torch.int32, device=device).view(len(PROMPTS), pages)
    fresh = [length - cached for cached, length in PROMPTS]
    q = normal(sum(fresh), shape.q_heads)
    kv_len = torch.tensor([length for _, length in PROMPTS], dtype=torch.int32, device=device)
    positions = torch.cat([torch.arange(*prompt, dtype=torch.int32, device=device) for prompt in PROMPTS])

    def run(kernel: Product, tile_m: int) -> torch.Tensor:
        height = rows_per_tile(shape.q_heads, shape.kv_heads, tile_m)
        tiles = RowTiles(*(part.to(device) for part in row_tiles(fresh, height)))
        place = (table, shape.page_size, kv_len, positions, tiles, height, shape.head_dim**-0.5, 1.0, 1.0)
        return kernel(q, k, v, *place)

    try:
        found = run(tall, TALL_TILE_M)
    except Exception as error:
        return _unusable(error)
    same = (found == run(short, TILE_M)).flatten(1).all(dim=1)
    return None if bool(same.all()) else f"row {int(same.int().argmin())} of {len(same)}"
