"""A small random checkpoint with five codebooks, for catalogs that a trained one does not come with.

Near-ties decide everything on an ordinary random model. This one has its head and its layers scaled up, so
that the logits spread over several nats and depend on the whole prefix: neighbouring ranks lie far apart.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from flashrec_harness.references.grammar import SidVocabulary

WORDS = 64
CODEBOOK_SIZE = 12
LEVELS = 5
_PADDING_ROWS = 5
_HIDDEN = 64
_LAYER_STD = 0.12
_HEAD_STD = 0.35
_ORDER = "cabed"
"""The codebooks' order in the vocabulary: not the levels' order, and with begin and end between them."""


def make_edge_checkpoint(directory: Path, seed: int) -> SidVocabulary:
    """Write the checkpoint into ``directory`` and say where its semantic-ID tokens stand."""
    tokenizer, vocabulary = _tokenizer()
    tokenizer.save_pretrained(directory)
    _model(len(tokenizer) + _PADDING_ROWS, tokenizer.eos_token_id, seed).save_pretrained(directory)
    return vocabulary


def _tokenizer() -> tuple[Any, SidVocabulary]:
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(WORDS)}
    plain = Tokenizer(models.WordLevel(words, unk_token="w0"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    codebooks = {letter: [f"<s_{letter}_{code}>" for code in range(CODEBOOK_SIZE)] for letter in sorted(_ORDER)}
    texts = ["<|end|>", *codebooks[_ORDER[0]], "<|sid_begin|>", *codebooks[_ORDER[1]], "<|sid_end|>"]
    for letter in _ORDER[2:]:
        texts.extend(codebooks[letter])
    plain.add_tokens([AddedToken(text, normalized=False) for text in texts])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<|end|>")
    ids = tokenizer.get_added_vocab()
    return tokenizer, SidVocabulary(
        codebooks=tuple(tuple(ids[text] for text in codebooks[letter]) for letter in sorted(_ORDER)),
        begin=ids["<|sid_begin|>"],
        end=ids["<|sid_end|>"],
    )


def _model(vocab_size: int, eos_token_id: int, seed: int) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=_HIDDEN,
        intermediate_size=2 * _HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=_LAYER_STD,
        eos_token_id=eos_token_id,
        bos_token_id=None,
    )
    config.dtype = torch.float32
    generator = torch.Generator().manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                std = _HEAD_STD if name == "lm_head.weight" else _LAYER_STD
                weight.normal_(std=std, generator=generator)
    return model
