"""What one forward pass needs beside the weights: where its tokens stand and how they attend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from flashrec.kernels.ops import Ops


class Quantized(NamedTuple):
    """An FP8 activation: ``values`` e4m3 [T, H] and its per-token ``scale`` float32 [T, 1]."""

    values: torch.Tensor
    scale: torch.Tensor


Activation = torch.Tensor | Quantized
"""What a linear layer accepts: a plain tensor [T, H] or one that a fused kernel has quantised (SPEC M6)."""


class Attend(Protocol):
    """Attention of one pass, bound to its metadata; keys and values are already in the pool."""

    def __call__(self, q: torch.Tensor, layer: int) -> Activation:
        """From queries [T, heads, head_dim] to the output projection's input [T, heads * head_dim]."""
        ...


@dataclass(frozen=True, slots=True)
class Ends:
    """The rows that a prefill pass is run for: ``rows`` int64 [E] of its T tokens, and the attention of those alone."""

    rows: torch.Tensor
    attend: Attend


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One pass over T tokens: ``positions`` int32 [T], ``slots`` int32 [T] (where K and V go in the pool).

    With ``ends`` the pass returns those rows only, and of the last layer the other rows need keys and values alone:
    8 x 2,465 tokens of Qwen3-1.7B's shape spare one layer in 28 but for its QKV product.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    attend: Attend
    ops: Ops
    ends: Ends | None = None
