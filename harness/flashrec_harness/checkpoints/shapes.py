"""Random-weight checkpoints of named shapes, for speed and memory: their answers mean nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from flashrec.console import make_console
from flashrec.errors import ConfigError
from flashrec_harness.checkpoints.config import ModelConfig, write_generation_config, write_json
from flashrec_harness.checkpoints.tokenizer import CHAT_END, build_tokenizer, save_tokenizer
from flashrec_harness.prompts import TEMPLATE_TEXTS

if TYPE_CHECKING:
    import torch

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
        model=ModelConfig(hidden_size=64, intermediate_size=128),
        codebook_sizes=(8, 8, 8),
        text_tokens=320,
        vocab_size=384,
    ),
    "tiny-8192": Shape(
        model=ModelConfig(hidden_size=64, intermediate_size=128),
        codebook_sizes=(8192, 8192, 8192),
        text_tokens=320,
        vocab_size=24_960,
    ),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32),
}
"""``qwen3-1.7b`` is the shape of every speed bar; ``tiny`` is for tests, ``tiny-8192`` for catalogs at scale."""


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
    ``catalog.json`` of that many random SIDs, one item each. Raises :class:`ConfigError` for an unknown name, or for
    more SIDs than the shape has, before it writes anything.
    """
    shape = SHAPES.get(name)
    if shape is None:
        raise ConfigError(f"--shape {name}: unknown; one of {', '.join(SHAPES)}")
    sids = None if catalog_sids is None else random_sids(shape.codebook_sizes, catalog_sids, seed)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(TEMPLATE_TEXTS, shape.codebook_sizes, text_tokens=shape.text_tokens)
    save_tokenizer(tokenizer, out, max_length=shape.model.max_position_embeddings)
    eos = tokenizer.token_to_id(CHAT_END)
    write_json(out / "config.json", shape.model.config_json(shape.vocab_size, eos))
    write_generation_config(out, eos)
    _write_weights(shape, out, seed, shard_bytes, console or make_console(stderr=True))
    if sids is not None:
        _write_catalog(sids, out / "catalog.json")


def tensor_shapes(model: ModelConfig, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a tied Qwen3's tensors, in the order of the forward pass."""
    hidden, head = model.hidden_size, model.head_dim
    queries, keys = model.num_attention_heads * head, model.num_key_value_heads * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab_size, hidden)}
    for index in range(model.num_hidden_layers):
        layer = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "self_attn.q_norm": (head,),
            "self_attn.k_norm": (head,),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (model.intermediate_size, hidden),
            "mlp.up_proj": (model.intermediate_size, hidden),
            "mlp.down_proj": (hidden, model.intermediate_size),
        }
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    return shapes


def random_sids(sizes: Sequence[int], count: int, seed: int) -> NDArray[np.int32]:
    """int32 ``[count, depth]``: distinct SIDs drawn uniformly, sorted. Raises :class:`ConfigError` if too many."""
    space = int(np.prod(np.array(sizes, dtype=object)))
    if not 0 < count <= space:
        raise ConfigError(f"--catalog-sids {count}: codebooks of {tuple(sizes)} have {space} SIDs")
    rng = np.random.default_rng(seed)
    if space <= 4 * count:
        keys = rng.permutation(space)[:count]
    else:
        keys = np.unique(rng.integers(0, space, count + count // 2))
        while len(keys) < count:
            keys = np.unique(np.concatenate([keys, rng.integers(0, space, count)]))
        keys = rng.permutation(keys)[:count]
    return np.stack(np.unravel_index(np.sort(keys), tuple(sizes)), axis=1).astype(np.int32)


def _shards(shapes: dict[str, tuple[int, ...]], shard_bytes: int) -> list[list[str]]:
    """Tensor names per file: consecutive ones while they fit, at least one."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _write_weights(shape: Shape, out: Path, seed: int, shard_bytes: int, console: Console) -> None:
    import torch
    from safetensors.torch import save_file

    shapes = tensor_shapes(shape.model, shape.vocab_size)
    generator = torch.Generator().manual_seed(seed)
    shards = _shards(shapes, shard_bytes)
    place: dict[str, str] = {}
    for number, names in enumerate(track(shards, "random weights", console=console), start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: _random(shapes[name], generator) for name in names}
        save_file(tensors, out / file, metadata={"format": "pt"})
        place |= dict.fromkeys(names, file)
    total = 2 * sum(int(np.prod(s)) for s in shapes.values())
    index = {"metadata": {"total_size": total}, "weight_map": place}
    write_json(out / "model.safetensors.index.json", index)


def _random(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """bf16; norm weights spread around 1, so that a norm that is left out shows."""
    import torch

    tensor = torch.empty(shape, dtype=torch.bfloat16)
    if len(shape) == 1:
        return tensor.normal_(1.0, _NORM_SPREAD, generator=generator)
    return tensor.normal_(0.0, _WEIGHT_STD, generator=generator)


def _write_catalog(sids: NDArray[np.int32], path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(_catalog_lines(sids))


def _catalog_lines(sids: NDArray[np.int32]) -> Iterator[str]:
    for number, sid in enumerate(sids.tolist()):
        opening = "{\n" if number == 0 else ",\n"
        yield f'{opening}"{",".join(map(str, sid))}": ["R{number}"]'
    yield "\n}\n"
