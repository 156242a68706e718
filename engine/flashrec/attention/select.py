"""Which attention backend an engine runs: decided once, at construction, and said why."""

from __future__ import annotations

import importlib.util

from flashrec.attention.base import AttentionBackend
from flashrec.attention.flashinfer import FlashInferAttention
from flashrec.attention.paged import PagedAttention
from flashrec.config import EngineConfig
from flashrec.errors import ConfigError
from flashrec.kernels.ops import Ops
from flashrec.kvcache.pool import KVPool

FLASHINFER_HEAD_DIMS = (64, 128, 256)


def select_attention(config: EngineConfig, pool: KVPool, num_heads: int, ops: Ops) -> AttentionBackend:
    """The backend that ``attention_backend`` asks for; ``auto`` takes FlashInfer on a GPU where it can serve.

    Raises:
        ConfigError: a backend was asked for by name and cannot serve here.
    """
    asked = config.attention_backend
    device = config.torch_device
    if asked in ("triton", "flashinfer") and device.type != "cuda":
        raise ConfigError(f"attention_backend: {asked} needs a CUDA device, not {device.type}")
    if asked == "flashinfer" or (asked == "auto" and device.type == "cuda" and _flashinfer_serves(pool)):
        if importlib.util.find_spec("flashinfer") is None:
            raise ConfigError("attention_backend: flashinfer is not installed; pip install 'flashrec[gpu]'")
        return FlashInferAttention(pool, num_heads, ops)
    return PagedAttention(pool, num_heads, ops)


def _flashinfer_serves(pool: KVPool) -> bool:
    return (
        importlib.util.find_spec("flashinfer") is not None
        and pool.head_dim in FLASHINFER_HEAD_DIMS
        and pool.k.dtype.itemsize <= 2
    )
