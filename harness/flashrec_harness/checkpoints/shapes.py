"""Random-weight checkpoints of named shapes, for speed and memory: their answers mean nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from safetensors.torch import save_file

from flashrec.errors import ConfigError
from flashrec_harness.checkpoints.config import ModelConfig, write_generation_config, write_json
from flashrec_harness.checkpoints.tokenizer import CHAT_END, build_tokenizer, pad_vocabulary, save_tokenizer
from flashrec_harness.prompts import TEMPLATE_TEXTS

_SHARD_BYTES = 2**30
_WEIGHT_STD = 0.02
_NORM_SPREAD = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Dimensions, codebooks and vocabulary of a checkpoint.

    ``text_tokens``: ids before the first codebook; what the small tokenizer does not use is named
    ``<|unused_0|>`` and so on, so that the codebooks stand where they do in a model of that family.
    """

    model: ModelConfig
    codebook_sizes: tuple[int, ...]
    text_tokens: int
    vocab_size: int


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int) -> Shape:
    """Published Qwen3 dimensions with the vocabulary of OpenOneRec: 3 x 8,192 codes after Qwen's 151,669 tokens."""
    return Shape(
        model=ModelConfig(
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=8,
            max_position_embeddings=40_960,
            rope_theta=1_000_000.0,
        ),
        codebook_sizes=(8192, 8192, 8192),
        text_tokens=151_669,
        vocab_size=176_640,
    )


SHAPES = {
    "tiny": Shape(
        model=ModelConfig(hidden_size=64, intermediate_size=128), codebook_sizes=(8, 8, 8), text_tokens=320, vocab_size=384
    ),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32),
}
"""``qwen3-1.7b`` is the shape of every speed bar; ``tiny`` is for tests."""


def make_shape(
    name: str,
    out: Path,
    seed: int,
    *,
    catalog_sids: int | None = None,
    shard_bytes: int = _SHARD_BYTES,
    console: Console | None = None,
) -> None:
    """Write a checkpoint directory of shape ``name`` with random bf16 weights and a tokenizer.

    Shards of about ``shard_bytes``, written one by one: memory stays at one shard. ``catalog_sids`` adds a
    ``catalog.json`` of that many random SIDs, one item each. Raises :class:`ConfigError` for an unknown name.
    """
    shape = SHAPES.get(name)
    if shape is None:
        raise ConfigError(f"--shape {name}: unknown; one of {', '.join(SHAPES)}")
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(TEMPLATE_TEXTS, shape.codebook_sizes, text_tokens=shape.text_tokens)
    save_tokenizer(tokenizer, out, max_length=shape.model.max_position_embeddings)
    eos = tokenizer.token_to_id(CHAT_END)
    write_json(out / "config.json", shape.model.config_json(shape.vocab_size, eos))
    write_generation_config(out, eos)
    _write_weights(shape, out, seed, shard_bytes, console or Console(stderr=True))
    if catalog_sids is not None:
        _write_random_catalog(shape.codebook_sizes, catalog_sids, out / "catalog.json", seed)
