"""A random Qwen3 of a few thousand parameters with a tokenizer and a catalog, for the determinism suite's tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from flashrec_harness.determinism.axes import AXES
from flashrec_harness.determinism.task import Task

WORDS, CODES, DEPTH = 96, 16, 3
CPU_AXES = tuple(name for name, axis in AXES.items() if not axis.needs_gpu)

MakeTask = Callable[..., Task]


def write_model(path: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=160, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=True, max_position_embeddings=512, eos_token_id=1,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj" in name or "embed" in name:
                parameter.mul_(6)
    model.save_pretrained(path)


def write_tokenizer(path: Path) -> None:
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    codes = [f"<s_{level}_{code}>" for level in "abc"[:DEPTH] for code in range(CODES)]
    names = ["<|sid_begin|>", *codes, "<|sid_end|>"]
    tokenizer.add_tokens([AddedToken(name, special=False) for name in names])
    tokenizer.save_pretrained(path)


def write_catalog(path: Path) -> None:
    drawn = np.random.default_rng(0).integers(0, CODES, (400, DEPTH))
    sids = sorted({tuple(codes) for codes in drawn.tolist()})
    path.write_text(json.dumps({",".join(map(str, sid)): [f"item{rank}"] for rank, sid in enumerate(sids)}))
