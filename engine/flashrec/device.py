"""What a device is called."""

from __future__ import annotations

import functools
import platform
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@functools.cache
def processor_name() -> str:
    """The processor's model name, from ``/proc/cpuinfo`` where there is one."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def device_name(device: torch.device) -> str:
    """A GPU's name, or the processor's."""
    if device.type != "cuda":
        return processor_name()
    import torch  # not above: whoever asks for the processor's name may have yet to choose a GPU

    return torch.cuda.get_device_name(device)
