"""How many of the suite's processes run side by side on one device, so that they jostle and none runs out of memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from flashrec.models.config import read_raw_config
from flashrec.models.registry import model_class
from flashrec_harness import hardware
from flashrec_harness.determinism.task import PROCESSES

GPU_POOL_TOKENS = 1 << 16
"""Tokens in each process's KV pool: some dozens of the suite's longest prompts."""

_GIB = 1 << 30
_OVERHEAD = 10 * _GIB
"""CUDA context, captured graphs, workspaces and beam slots of 8,192 rows."""


def pool_settings() -> dict[str, Any]:
    """Engine settings that leave room for other processes on the GPU; none on a CPU, whose default is small."""
    return {"kv_pool_tokens": GPU_POOL_TOKENS} if hardware.has_gpu() else {}


def processes_at_once(model_path: Path) -> int:
    """As many as the device has memory for; on a CPU two, on cores of their own."""
    gpu = hardware.visible_gpu()
    if gpu is None:
        return min(2, len(os.sched_getaffinity(0)))
    raw = read_raw_config(model_path)
    kv_bytes = model_class(raw).parse_config(raw, model_path).kv_bytes_per_token(2)
    weights = sum(file.stat().st_size for file in model_path.glob("*.safetensors"))
    return fitting(gpu.memory_mib << 20, weights, kv_bytes)


def fitting(memory: int, weights: int, kv_bytes_per_token: int) -> int:
    """Processes of a checkpoint of ``weights`` bytes that fit in ``memory`` bytes, at least one, at most all.

    The weights count twice: quantising holds both forms for a while.
    """
    each = 2 * weights + GPU_POOL_TOKENS * kv_bytes_per_token + _OVERHEAD
    return max(1, min(PROCESSES, int(0.9 * memory) // each))
