"""From a configuration to everything that an engine holds: model, pool, catalog, tokenizer."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from flashrec.attention.base import AttentionBackend
from flashrec.attention.select import select_attention
from flashrec.config import EngineConfig
from flashrec.device import device_name
from flashrec.errors import CheckpointError, ConfigError
from flashrec.kernels.ops import Ops, select_ops
from flashrec.kernels.tiles import AttentionShape, rows_per_tile
from flashrec.kvcache.pool import KVPool
from flashrec.kvcache.radix import RadixCache
from flashrec.layers.rotary import RopeRung
from flashrec.models.base import CausalLM, ModelOptions
from flashrec.models.config import ModelConfig, read_raw_config
from flashrec.models.registry import model_class
from flashrec.models.weights import kv_scales, load_weights
from flashrec.runtime.catalogs import DEFAULT, Catalogs, packing_of
from flashrec.runtime.member import Limits
from flashrec.runtime.memory import MemoryPlan, plan_memory
from flashrec.sid.layout import SidLayout, infer_layout
from flashrec.sid.peek import peek_depth

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """The parts of an engine. ``layout`` is ``None`` for a search without a catalog; ``kv_scales`` says where the
    scales of an FP8 cache come from (SPEC M12)."""

    device: torch.device
    model: CausalLM
    pool: KVPool
    cache: RadixCache
    attention: AttentionBackend
    ops: Ops
    tokenizer: Any
    layout: SidLayout | None
    catalogs: Catalogs
    limits: Limits
    memory: MemoryPlan
    fp8: bool
    kv_scales: str

    def described(self) -> dict[str, Any]:
        """The device, and what runs on it: kernels, attention, and the cache's type and scales."""
        return {
            "device": str(self.device),
            "device_name": device_name(self.device),
            "kv_cache_dtype": str(self.pool.k.dtype).removeprefix("torch."),
            "kv_scales": self.kv_scales,
            "kernels": self.ops.chosen,
            "attention": self.attention.name,
        }

    @property
    def tile_rows(self) -> int:
        return rows_per_tile(self.model.config.num_heads, self.pool.num_kv_heads)


def load_engine_parts(config: EngineConfig) -> Loaded:
    """Read the checkpoint and the catalog and allocate the pool.

    Raises:
        FlashRecError: of the class that says what is wrong, in one line.
    """
    if config.torch_device.type == "cpu":
        torch.set_num_threads(config.cpu_threads)
    elif (config.torch_device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device: {config.device} is not here, torch sees {torch.cuda.device_count()} CUDA GPUs")
    raw = read_raw_config(config.model_path)
    kind = model_class(raw)
    model_config = kind.parse_config(raw, config.model_path)
    fp8 = _uses_fp8(config, model_config)
    tokenizer = load_tokenizer(config.model_path)
    layout = load_layout(config, tokenizer)
    catalogs = Catalogs(config, layout, config.torch_device)
    if config.sid_vocab_file is not None:
        catalogs.place(catalogs.read(DEFAULT, config.sid_vocab_file))
    levels = 0 if layout is None else layout.depth + (1 if config.score_end else 0)
    passes = levels - 1 if levels else config.max_decode_steps - 1
    device = config.torch_device
    memory = plan_memory(config, model_config, passes, _weight_bytes(config, model_config, fp8))
    scales = kv_scales(config.model_path, model_config.num_layers)
    pool = _allocate_pool(config, model_config, memory, scales)
    ops = select_ops(
        device,
        config.compute_dtype,
        "fp8" if fp8 else "none",
        kernels="torch" if config.attention_backend == "torch" else "auto",
        weights=model_config.projection_sizes,
        attention=AttentionShape(
            model_config.num_heads,
            model_config.num_kv_heads,
            model_config.head_dim,
            config.page_tokens,
            memory.kv_dtype,
        ),
        enable_fused_rms_fp8=config.enable_fused_rms_fp8,
        enable_fused_silu_fp8=config.enable_fused_silu_fp8,
        enable_fused_qk_rope_kv=config.enable_fused_qk_rope_kv,
    )
    options = ModelOptions(
        dtype=config.compute_dtype,
        device=device,
        fp8=fp8,
        fused_rms_fp8=config.enable_fused_rms_fp8,
        fused_silu_fp8=config.enable_fused_silu_fp8,
        rope_rung=_rope_rung(config),
    )
    model = kind.build(model_config, options, pool, memory.max_context + max(passes, 1))
    load_weights(model, config.model_path, progress=sys.stderr.isatty())
    return Loaded(
        device=device,
        model=model,
        pool=pool,
        cache=RadixCache(pool, enabled=not config.disable_radix_cache),
        attention=select_attention(config, pool, model_config.num_heads, ops, fp8=fp8),
        ops=ops,
        tokenizer=tokenizer,
        layout=layout,
        catalogs=catalogs,
        limits=Limits(
            vocab_size=model_config.vocab_size,
            max_context=memory.max_context,
            max_beam_width=config.max_beam_width,
            max_decode_steps=config.max_decode_steps,
            default_space=config.score_space,
            eos_token_ids=model_config.eos_token_ids,
        ),
        memory=memory,
        fp8=fp8,
        kv_scales=_scale_source(pool, scales),
    )


def load_tokenizer(model_path: Path) -> Any:
    """The checkpoint's fast tokenizer, or ``None`` where it has none (prompts are then token ids)."""
    if not all((model_path / name).is_file() for name in TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(model_path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # Of a broken file transformers and its parsers raise anything.
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{model_path}: the tokenizer cannot be read ({reason})") from None


def load_layout(config: EngineConfig, tokenizer: Any) -> SidLayout | None:
    """The layout of every catalog that this engine will serve, or ``None`` without ``sid_vocab_file``."""
    if config.sid_vocab_file is None:
        for name in ("sid", "sid_packed"):
            if getattr(config, name) is not None:
                raise ConfigError(f"{name}: needs sid_vocab_file, the catalog that it is about")
        return None
    if tokenizer is None:
        raise CheckpointError(f"{config.model_path}: a catalog needs the tokenizer ({' and '.join(TOKENIZER_FILES)})")
    depth = peek_depth(config.sid_vocab_file, packing=packing_of(config))
    return infer_layout(tokenizer, depth=depth, override=config.sid)


def _uses_fp8(config: EngineConfig, model: ModelConfig) -> bool:
    if config.quantization == "none" and model.fp8:
        raise ConfigError("quantization: none, but config.json has a quantization_config: the weights are FP8")
    return model.fp8 or config.quantization == "fp8"


def _rope_rung(config: EngineConfig) -> RopeRung:
    """Without the fusion the norms run apart; the rest stays one kernel unless plain PyTorch is asked for."""
    if config.enable_fused_qk_rope_kv:
        return RopeRung.FUSED
    return RopeRung.PLAIN if config.attention_backend == "torch" else RopeRung.ROPE_STORE


def _weight_bytes(config: EngineConfig, model: ModelConfig, fp8: bool) -> int:
    attention = model.hidden_size * (model.qkv_size + model.num_heads * model.head_dim)
    layers = model.num_layers * (attention + 3 * model.hidden_size * model.intermediate_size)
    tables = model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2)
    size = config.compute_dtype.itemsize
    return layers * (1 if fp8 else size) + 2 * tables * size


def _scale_source(pool: KVPool, scales: object) -> str:
    if pool.k.dtype is not torch.float8_e4m3fn:
        return "none: the cache is not FP8"
    return "1.0: the checkpoint has none" if scales is None else "from the checkpoint"


def _allocate_pool(
    config: EngineConfig,
    model: ModelConfig,
    memory: MemoryPlan,
    scales: tuple[tuple[float, ...], tuple[float, ...]] | None,
) -> KVPool:
    k_scale, v_scale = scales if scales is not None and memory.kv_dtype is torch.float8_e4m3fn else (None, None)
    return KVPool.allocate(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        num_pages=memory.num_pages,
        page_size=config.page_tokens,
        beam_slots=memory.beam_slots,
        dtype=memory.kv_dtype,
        device=config.torch_device,
        k_scale=k_scale,
        v_scale=v_scale,
    )
