"""Host arrays to the device without stalling the host."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


def staged(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """A host tensor of ``array`` that a copy to ``device`` can read asynchronously: pinned for a GPU."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def upload(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """A copy of ``array`` on ``device``, ordered on the current stream."""
    return staged(array, device).to(device, non_blocking=True)


def overwrite(target: torch.Tensor, array: NDArray[np.generic]) -> None:
    """Copy ``array`` over a static device tensor, ordered on the current stream."""
    target.copy_(staged(array, target.device), non_blocking=True)
