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


def select_attention(config: EngineConfig, pool: KVPool, num_heads: int, ops: Ops, *, fp8: bool) -> AttentionBackend:
    """The backend that ``attention_backend`` asks for; ``auto`` takes the engine's own kernels. ``fp8`` says that
    the output projection takes FP8.

    One H200, bf16, 8 x 2,465 causal tokens of 16 / 8 heads, pages of 64, 2026-11-29: the Triton prefill kernel
    456 us, FlashInfer's paged FlashAttention-3 509 us.

    Raises:
        ConfigError: a backend was asked for by name and cannot serve here.
    """
    asked, device = config.attention_backend, config.torch_device
    if asked in ("triton", "flashinfer") and device.type != "cuda":
        raise ConfigError(f"attention_backend: {asked} needs a CUDA device, not {device.type}")
    if asked == "flashinfer":
        if importlib.util.find_spec("flashinfer") is None:
            raise ConfigError("attention_backend: flashinfer is not installed; pip install 'flashrec[gpu]'")
        return FlashInferAttention(pool, num_heads, ops, quantize=fp8)
    return PagedAttention(pool, num_heads, ops, quantize=fp8)
