"""A small byte-level BPE tokenizer with OneRec's added tokens and a ChatML template.

Vocabulary order: byte-level BPE, control tokens, ``<s_a_0>`` ... per codebook, ``<|sid_begin|>``,
``<|sid_end|>``. The semantic-ID tokens are ordinary added tokens, not *special* ones: they stay in decoded text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

PAD, CHAT_START, CHAT_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_CONTROL = (PAD, CHAT_START, CHAT_END)
SID_BEGIN, SID_END = "<|sid_begin|>", "<|sid_end|>"

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""Qwen's ChatML, without tools and thinking."""

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen's pre-tokenizer pattern."""


def sid_token(level: int, code: int) -> str:
    """The added token of a code: ``<s_a_0>``, ``<s_b_0>``, ..."""
    return f"<s_{chr(ord('a') + level)}_{code}>"


def sid_text(codes: Sequence[int]) -> str:
    """A semantic ID as it stands in a prompt, between its begin and end tokens."""
    return SID_BEGIN + "".join(sid_token(level, code) for level, code in enumerate(codes)) + SID_END


def build_tokenizer(
    corpus: Iterable[str], sizes: Sequence[int], *, text_vocab: int = 512, text_tokens: int | None = None
) -> Tokenizer:
    """Train the BPE on ``corpus`` and add the tokens of codebooks with ``sizes`` codes.

    ``text_vocab``: at most this many byte-level tokens, at least the 256 bytes. ``text_tokens``: where the first
    codebook starts; ids that the BPE and the control tokens leave free are filled with ``<|unused_0|>`` and so on,
    which no text encodes to. The result depends on the corpus alone.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=max(text_vocab, 256),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    if text_tokens is not None:
        tokenizer = _filled(tokenizer, text_tokens - len(_CONTROL))
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in _CONTROL])
    codes = [sid_token(level, code) for level, size in enumerate(sizes) for code in range(size)]
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in (*codes, SID_BEGIN, SID_END)])
    return tokenizer


def _filled(tokenizer: Tokenizer, size: int) -> Tokenizer:
    """The same tokenizer with entries that no merge reaches, up to ``size``."""
    content = json.loads(tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    missing = range(len(vocabulary), size)
    vocabulary.update((f"<|unused_{i}|>", token) for i, token in enumerate(missing))
    return Tokenizer.from_str(json.dumps(content))


def save_tokenizer(tokenizer: Tokenizer, out: Path, *, max_length: int) -> None:
    """Write ``tokenizer.json`` and the ``tokenizer_config.json`` that transformers reads."""
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "bos_token": None,
        "eos_token": CHAT_END,
        "pad_token": PAD,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
