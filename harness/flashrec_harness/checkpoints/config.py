"""Model dimensions, how to train, and a Qwen3 directory as Hugging Face lays it out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import Qwen3Config

_VOCAB_MULTIPLE = 64
"""The embedding is padded to a multiple of this, as published checkpoints are: some ids have no token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Dimensions of a Qwen3; the default has about 0.8 M parameters. Embeddings are tied."""

    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 128
    max_position_embeddings: int = 4096
    rope_theta: float = 10_000.0

    def config_json(self, vocab_size: int, eos_token_id: int | None) -> dict[str, Any]:
        """``config.json`` in the form that Qwen3's own checkpoints use."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "eos_token_id": eos_token_id,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_position_embeddings,
            "max_window_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "rms_norm_eps": 1e-6,
            "rope_scaling": None,
            "rope_theta": self.rope_theta,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": vocab_size,
        }

    def qwen3(self, tokens: int) -> Qwen3Config:
        """The transformers config for a tokenizer of ``tokens`` tokens, the vocabulary padded."""
        from transformers import Qwen3Config

        padded = -(-tokens // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
        return Qwen3Config(**self.config_json(padded, None))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """How to train. ``dropout`` applies to the embedding and to each block's two outputs."""

    steps: int = 1600
    batch_size: int = 64
    learning_rate: float = 3e-3
    warmup_steps: int = 100
    weight_decay: float = 0.02
    dropout: float = 0.0
    label_smoothing: float = 0.0
    shuffle_history: float = 0.0
    max_history: int = 10
    save_every: int = 50


def write_model(model: Any, out: Path, *, eos_token_id: int) -> None:
    """Write ``config.json``, ``generation_config.json`` and ``model.safetensors`` (bf16; the tied head is left out)."""
    import torch
    from safetensors.torch import save_file

    c = model.config
    dimensions = ModelConfig(
        **{name: getattr(c, name) for name in ModelConfig.__dataclass_fields__ if name != "rope_theta"},
        rope_theta=c.rope_parameters["rope_theta"],
    )
    write_json(out / "config.json", dimensions.config_json(c.vocab_size, eos_token_id))
    write_generation_config(out, eos_token_id)
    tensors = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def write_generation_config(out: Path, eos_token_id: int | None) -> None:
    """``generation_config.json``: greedy, ending at the end of the assistant's turn."""
    write_json(out / "generation_config.json", {"do_sample": False, "eos_token_id": eos_token_id})


def write_json(path: Path, content: Any) -> None:
    """Indented JSON with a final newline."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
