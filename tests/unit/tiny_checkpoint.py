"""A random-weight Qwen3 of a few thousand parameters, written as Hugging Face would, for loading tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCAB = 96
Tensors = dict[str, torch.Tensor]


def write_checkpoint(path: Path, *, seed: int = 0, tied: bool = True, layers: int = 2, **overrides: Any) -> Path:
    """Save a checkpoint to ``path``; weights are scaled up so that its logits have margins."""
    torch.manual_seed(seed)
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 256,
        "eos_token_id": 1,
    }
    model = Qwen3ForCausalLM(Qwen3Config(**(fields | overrides)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj" in name or "embed" in name:
                parameter.mul_(6)
            if "q_norm" in name or "k_norm" in name:
                parameter.add_(torch.rand_like(parameter))
    model.save_pretrained(path)
    return path


def edit_config(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite ``config.json`` after ``change`` has edited it in place."""
    file = path / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


def edit_tensors(path: Path, change: Callable[[Tensors], object]) -> None:
    """Rewrite ``model.safetensors`` after ``change`` has edited its tensors in place."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
