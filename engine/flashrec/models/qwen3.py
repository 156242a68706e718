"""Qwen3: grouped-query attention with QK-norm, RMSNorm, SwiGLU (Qwen3 technical report, 2025)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Self

import torch
from torch.nn import functional

from flashrec.batch import Activation, Ends, ForwardBatch
from flashrec.errors import CheckpointError, UnsupportedModelError
from flashrec.kvcache.pool import KVPool
from flashrec.layers.linear import Linear
from flashrec.layers.mlp import SwiGLU
from flashrec.layers.norm import RMSNorm
from flashrec.layers.rotary import RotaryStore, rope_table
from flashrec.layers.weight import WeightTarget
from flashrec.models.base import CausalLM, ModelOptions, Placement
from flashrec.models.config import (
    ModelConfig,
    RawConfig,
    checkpoint_is_fp8,
    dimension,
    eos_ids,
    refuse_unsupported,
    required,
)


class Qwen3Attention:
    """One QKV GEMM, QK-norm + RoPE + store, attention, output projection."""

    def __init__(self, config: ModelConfig, options: ModelOptions, layer: int, rotary: RotaryStore) -> None:
        kv_size = config.num_kv_heads * config.head_dim
        q_size = config.num_heads * config.head_dim
        parts = (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size))
        kind: Placement = {"dtype": options.dtype, "device": options.device}
        self.qkv_proj = Linear(parts, config.hidden_size, **kind, fp8=options.fp8)
        self.o_proj = Linear((("o_proj", config.hidden_size),), q_size, **kind, fp8=options.fp8)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, **kind)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, **kind)
        self.rotary = rotary
        self.layer = layer

    def __call__(self, x: Activation, batch: ForwardBatch, ends: Ends | None) -> torch.Tensor:
        """From [T, H] to [T, H], or to [E, H] with ``ends``; K and V of all T tokens are stored."""
        qkv = self.qkv_proj(x, batch.ops)
        q = self.rotary(qkv, self.q_norm.weight, self.k_norm.weight, self.layer, batch)
        attended = batch.attend(q, self.layer) if ends is None else ends.attend(q[ends.rows], self.layer)
        return self.o_proj(attended, batch.ops)

    def targets(self, prefix: str, *, scales_in_checkpoint: bool) -> Iterator[WeightTarget]:
        yield from self.qkv_proj.targets(prefix, scales_in_checkpoint=scales_in_checkpoint)
        yield from self.o_proj.targets(prefix, scales_in_checkpoint=scales_in_checkpoint)
        yield from self.q_norm.targets(f"{prefix}q_norm")
        yield from self.k_norm.targets(f"{prefix}k_norm")


class Qwen3Layer:
    """Norm, attention, norm, feed-forward; the residual stream stays apart (SPEC M6)."""

    def __init__(self, config: ModelConfig, options: ModelOptions, layer: int, rotary: RotaryStore) -> None:
        kind: Placement = {"dtype": options.dtype, "device": options.device}
        quantize = options.fp8 and options.fused_rms_fp8
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, **kind, quantize=quantize)
        self.attention = Qwen3Attention(config, options, layer, rotary)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, **kind, quantize=quantize)
        self.mlp = SwiGLU(
            config.hidden_size,
            config.intermediate_size,
            **kind,
            fp8=options.fp8,
            quantize=options.fp8 and options.fused_silu_fp8,
        )

    def __call__(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch, ends: Ends | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(hidden, residual)`` [T, H] in and out; with ``ends`` [E, H] out."""
        x, residual = self.input_norm(hidden, residual, batch.ops)
        hidden = self.attention(x, batch, ends)
        if ends is not None:
            residual = residual[ends.rows]
        x, residual = self.post_norm(hidden, residual, batch.ops)
        return self.mlp(x, batch.ops), residual

    def targets(self, prefix: str, *, scales_in_checkpoint: bool) -> Iterator[WeightTarget]:
        yield from self.input_norm.targets(f"{prefix}input_layernorm")
        yield from self.post_norm.targets(f"{prefix}post_attention_layernorm")
        yield from self.attention.targets(f"{prefix}self_attn.", scales_in_checkpoint=scales_in_checkpoint)
        yield from self.mlp.targets(f"{prefix}mlp.", scales_in_checkpoint=scales_in_checkpoint)


class Qwen3ForCausalLM(CausalLM):
    """The Hugging Face architecture of that name."""

    def __init__(self, config: ModelConfig, options: ModelOptions, pool: KVPool, max_position: int) -> None:
        self.config = config
        table = rope_table(config.head_dim, config.rope_theta, max_position, options.device)
        rotary = RotaryStore(pool, table, config.num_heads, config.rms_norm_eps, options.rope_rung)
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = torch.empty(shape, dtype=options.dtype, device=options.device)
        self.layers = [Qwen3Layer(config, options, index, rotary) for index in range(config.num_layers)]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=options.dtype, device=options.device)
        self.head = self.embedding if config.tie_word_embeddings else torch.empty_like(self.embedding)

    @classmethod
    def parse_config(cls, raw: RawConfig, model_path: Path) -> ModelConfig:
        refuse_unsupported(raw, "Qwen3ForCausalLM")
        if raw.get("hidden_act", "silu") != "silu":
            raise UnsupportedModelError(
                f"config.json: hidden_act = {raw['hidden_act']!r} is not supported for Qwen3ForCausalLM; expected silu"
            )
        hidden, heads = dimension(raw, "hidden_size"), dimension(raw, "num_attention_heads")
        kv_heads = dimension(raw, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise CheckpointError(
                f"config.json: num_attention_heads = {heads} is no multiple of num_key_value_heads = {kv_heads}"
            )
        rope = raw.get("rope_parameters") or {}
        return ModelConfig(
            architecture="Qwen3ForCausalLM",
            vocab_size=dimension(raw, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=dimension(raw, "intermediate_size"),
            num_layers=dimension(raw, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dimension(raw, "head_dim", hidden // heads),
            rms_norm_eps=required(raw, "rms_norm_eps"),
            rope_theta=float(rope.get("rope_theta") or required(raw, "rope_theta")),
            max_position=dimension(raw, "max_position_embeddings"),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            eos_token_ids=eos_ids(raw, model_path),
            fp8=checkpoint_is_fp8(raw),
        )

    @classmethod
    def build(cls, config: ModelConfig, options: ModelOptions, pool: KVPool, max_position: int) -> Self:
        return cls(config, options, pool, max_position)

    def forward(self, input_ids: torch.Tensor, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = functional.embedding(input_ids, self.embedding)
        residual: torch.Tensor | None = None
        for layer in self.layers[:-1]:
            hidden, residual = layer(hidden, residual, batch)
        return self.layers[-1](hidden, residual, batch, batch.ends)

    def final_norm(self, hidden: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        normed: torch.Tensor
        normed, _ = batch.ops.add_rms_norm(hidden, residual, self.norm.weight, self.norm.eps)
        return normed

    def lm_head(self) -> torch.Tensor:
        return self.head

    def targets(self) -> Iterator[WeightTarget]:
        shape = tuple(self.embedding.shape)
        yield WeightTarget("model.embed_tokens.weight", shape, self.embedding.copy_)
        yield from self.norm.targets("model.norm")
        if not self.config.tie_word_embeddings:
            yield WeightTarget("lm_head.weight", shape, self.head.copy_)
        for index, layer in enumerate(self.layers):
            yield from layer.targets(f"model.layers.{index}.", scales_in_checkpoint=self.config.fp8)
