"""How much of the device goes to what, settled before anything is served."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashrec.config import EngineConfig
from flashrec.errors import ConfigError
from flashrec.models.config import ModelConfig

KV_DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes of the KV pool, in pages and beam slots, and the longest prompt that it can hold."""

    num_pages: int
    beam_slots: int
    max_context: int
    kv_dtype: torch.dtype


def kv_dtype(config: EngineConfig) -> torch.dtype:
    """The pool's type: what ``kv_cache_dtype`` says, else the compute type."""
    if config.kv_cache_dtype == "auto":
        return config.compute_dtype
    return KV_DTYPES[config.kv_cache_dtype]


def plan_memory(config: EngineConfig, model: ModelConfig, passes: int, weight_bytes: int) -> MemoryPlan:
    """Share out the budget: beam slots for a full wave first, the rest for context pages.

    ``passes`` is the number of decode passes that a wave stores keys for, ``weight_bytes`` what the model
    will take. Raises :class:`ConfigError` when the budget holds no prompt.
    """
    dtype = kv_dtype(config)
    per_token = model.kv_bytes_per_token(dtype.itemsize)
    beam_slots = config.rows_per_wave * max(passes, 1)
    longest = min(config.max_context or model.max_position, model.max_position)
    pages_per_prompt = -(-longest // config.page_tokens)
    if config.kv_pool_tokens is not None:
        usable = config.kv_pool_tokens // config.page_tokens
    elif config.torch_device.type == "cuda":
        usable = _gpu_pages(config, model, per_token, beam_slots, weight_bytes)
    else:
        usable = min(config.kv_pool_bytes // (per_token * config.page_tokens), pages_per_prompt * config.max_requests)
    if usable < 1:
        raise ConfigError(
            f"kv_pool_tokens: the memory budget leaves no page of {config.page_tokens} tokens ({per_token} bytes each) "
            f"beside {beam_slots} beam slots; lower max_rows or raise the budget"
        )
    return MemoryPlan(
        num_pages=usable + 1,
        beam_slots=beam_slots,
        max_context=min(longest, usable * config.page_tokens),
        kv_dtype=dtype,
    )


def _gpu_pages(config: EngineConfig, model: ModelConfig, per_token: int, beam_slots: int, weight_bytes: int) -> int:
    """Pages that fit beside the weights, the beam slots and the widest pass's activations."""
    free, _ = torch.cuda.mem_get_info(config.torch_device)
    rows = max(config.prefill_chunk, config.rows_per_wave)
    widest = 3 * model.intermediate_size + 2 * model.qkv_size + 6 * model.hidden_size
    logits = 3 * 4 * config.rows_per_wave * min(model.vocab_size, 1 << 16)
    workspace = rows * widest * 2 + logits
    budget = int(free * config.memory_fraction) - weight_bytes - workspace - beam_slots * per_token
    return budget // (per_token * config.page_tokens)
