"""Where a checkpoint tensor goes. Layers list their targets; :mod:`flashrec.models.weights` fills them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Store = Callable[[torch.Tensor], object]


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """One checkpoint tensor that a layer expects.

    ``store`` takes the tensor once its name, shape (``shape`` or one of ``shapes``) and, where ``dtype`` is
    set, its dtype have been checked. ``aliases`` are other names that it may have.
    """

    name: str
    shape: tuple[int, ...]
    store: Store
    dtype: torch.dtype | None = None
    aliases: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()

    def accepts(self, shape: tuple[int, ...]) -> bool:
        return shape == self.shape or shape in self.shapes
