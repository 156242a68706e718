"""Engines over a random checkpoint with a tokenizer and a catalog, small enough for unit tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tiny_checkpoint import write_checkpoint
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flashrec import Engine, EngineConfig, Request

WORDS, CODES, DEPTH = 64, 12, 3
CATALOG = "catalog.json"


def write_shop(path: Path) -> Path:
    """A checkpoint of ``WORDS`` words and ``DEPTH`` codebooks of ``CODES`` codes, with about 180 SIDs."""
    write_checkpoint(path, vocab_size=128)
    backend = Tokenizer(models.WordLevel({f"w{index}": index for index in range(WORDS)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    codes = [f"<s_{level}_{code}>" for level in "abc"[:DEPTH] for code in range(CODES)]
    tokenizer.add_tokens([AddedToken(name, special=False) for name in ("<|sid_begin|>", *codes, "<|sid_end|>")])
    tokenizer.save_pretrained(path)
    drawn = np.random.default_rng(0).integers(0, CODES, (200, DEPTH)).tolist()
    sids = sorted({tuple(codes) for codes in drawn})
    (path / CATALOG).write_text(json.dumps({",".join(map(str, sid)): [f"item{i}"] for i, sid in enumerate(sids)}))
    return path


def write_catalog(path: Path, seed: int) -> None:
    """Another catalog for :func:`write_shop`'s checkpoint, whose item ids name the ``seed``: a foreign one shows."""
    sids = np.random.default_rng(seed).integers(0, CODES, (150, DEPTH)).tolist()
    path.write_text(json.dumps({",".join(map(str, sid)): [f"seed{seed}-{i}"] for i, sid in enumerate(sids)}))


def open_engine(path: Path, *, catalog: bool = True, **fields: Any) -> Engine:
    """A CPU engine of :func:`write_shop`'s checkpoint, by default with 4-token pages and 64 rows."""
    defaults: dict[str, Any] = {
        "device": "cpu", "page_size": 4, "kv_pool_tokens": 512, "max_rows": 64, "max_beam_width": 32,
        "max_requests": 8, "invariance_check": False,
    }  # fmt: skip
    return Engine(
        EngineConfig(model_path=path, **({"sid_vocab_file": path / CATALOG if catalog else None} | defaults | fields))
    )


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """``length`` random words."""
    return tuple(np.random.default_rng(seed).integers(0, WORDS, length).tolist())


def ask(length: int, *, seed: int = 0, n: int = 3, **fields: Any) -> Request:
    """A request with a random prompt."""
    return Request(input_ids=prompt(length, seed), n=n, **fields)
