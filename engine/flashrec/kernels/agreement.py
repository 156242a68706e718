"""Do two matrix products give a row the same bits, at every number of rows? Asked of the device, at construction."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from flashrec.kernels.quantize import quant_per_token, quantize_weight

Product = Callable[..., torch.Tensor]

ROWS = (1, 8, 50, 128, 384, 385, 512, 1001, 2048, 4096)


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
        whole = one(*rows, *rest)
        for count in ROWS:
            for product in (one, other):
                if not torch.equal(product(*(part[:count] for part in rows), *rest), whole[:count]):
                    return f"{count} rows of a [{outs}, {size}] weight"
    return None
