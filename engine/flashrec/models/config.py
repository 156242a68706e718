"""What the engine needs to know about a checkpoint, read from its ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashrec.errors import CheckpointError, UnsupportedModelError

RawConfig = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Dimensions of a decoder-only transformer. ``fp8`` says that the checkpoint's projections are FP8."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    fp8: bool

    @property
    def qkv_size(self) -> int:
        """Output rows of the fused QKV projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def projection_sizes(self) -> tuple[tuple[int, int], ...]:
        """(outputs, inputs) of a layer's four fused projections: QKV, output, gate and up, down."""
        hidden, inter = self.hidden_size, self.intermediate_size
        q_size = self.num_heads * self.head_dim
        return (self.qkv_size, hidden), (hidden, q_size), (2 * inter, hidden), (hidden, inter)

    def kv_bytes_per_token(self, dtype_size: int) -> int:
        """Bytes of keys and values that one token takes in the pool (SPEC M11)."""
        return 2 * self.num_kv_heads * self.head_dim * self.num_layers * dtype_size


def read_raw_config(model_path: Path) -> RawConfig:
    """Parse ``config.json``. Raises :class:`CheckpointError` when it is absent or not a JSON object."""
    path = model_path / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; --model-path wants a Hugging Face model directory")
    return read_json_object(path)


def read_json_object(path: Path) -> RawConfig:
    """Parse one of a checkpoint's JSON files. Raises :class:`CheckpointError` when it is not a JSON object."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON ({error})") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(raw).__name__}")
    return raw


def refuse_unsupported(raw: RawConfig, architecture: str) -> None:
    """Raise :class:`UnsupportedModelError` for a feature with neither a kernel nor a fallback (SPEC M3).

    These are features that a decoder of any family can switch on; a model class adds its own.
    """

    def refuse(field: str, value: object, why: str) -> None:
        raise UnsupportedModelError(f"config.json: {field} = {value!r} is not supported for {architecture}: {why}")

    rope = raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        refuse("rope_scaling", kind, "only the default rotary embedding is implemented")
    rope = raw.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        refuse("rope_parameters.rope_type", kind, "only the default rotary embedding is implemented")
    factor = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if factor != 1.0:
        refuse("partial_rotary_factor", factor, "the rotary embedding covers whole heads")
    if raw.get("use_sliding_window") and raw.get("sliding_window") is not None:
        refuse("use_sliding_window", True, f"attention would ignore sliding_window = {raw['sliding_window']}")
    others = sorted(set(raw.get("layer_types") or []) - {"full_attention"})
    if others:
        refuse("layer_types", others, "every layer must be full_attention")
    for field in ("num_experts", "num_local_experts", "n_routed_experts"):
        if raw.get(field):
            refuse(field, raw[field], "mixtures of experts are not implemented")
    if raw.get("kv_lora_rank"):
        refuse("kv_lora_rank", raw["kv_lora_rank"], "multi-head latent attention is not implemented")
    for field in ("attention_bias", "mlp_bias", "qkv_bias"):
        if raw.get(field):
            refuse(field, raw[field], "projections have no bias")
    for field in ("final_logit_softcapping", "attn_logit_softcapping"):
        if raw.get(field) is not None:
            refuse(field, raw[field], "soft caps are not implemented")


def checkpoint_is_fp8(raw: RawConfig) -> bool:
    """Whether ``quantization_config`` declares per-channel FP8 weights with dynamic per-token activations.

    Raises :class:`UnsupportedModelError` for any other quantisation, :class:`CheckpointError` for no object.
    """
    quant = raw.get("quantization_config")
    if not quant:
        return False
    if not isinstance(quant, dict):
        raise CheckpointError(f"config.json: quantization_config = {quant!r}: expected an object")
    method = quant.get("quant_method")
    if method not in ("fp8", "compressed-tensors"):
        raise UnsupportedModelError(
            f"config.json: quantization_config.quant_method = {method!r} is not supported: expected 'fp8'"
        )
    if quant.get("weight_block_size") is not None:
        raise UnsupportedModelError(
            f"config.json: quantization_config.weight_block_size = {quant['weight_block_size']!r} is not supported: "
            "weight scales must be per output channel or per tensor"
        )
    scheme = quant.get("activation_scheme", "dynamic")
    if scheme != "dynamic":
        raise UnsupportedModelError(
            f"config.json: quantization_config.activation_scheme = {scheme!r} is not supported: expected 'dynamic'"
        )
    for name, group in (quant.get("config_groups") or {}).items():
        _check_group(name, group)
    return True


def _check_group(name: str, group: RawConfig) -> None:
    """Refuse a compressed-tensors group that is not 8-bit float on both sides: weights per channel or per tensor,
    activations per token and dynamic."""
    eight: dict[str, tuple[object, ...]] = {"num_bits": (8,), "type": ("float",)}
    wanted: dict[str, dict[str, tuple[object, ...]]] = {
        "weights": eight | {"strategy": ("channel", "tensor")},
        "input_activations": eight | {"strategy": ("token",), "dynamic": (True,)},
    }
    for side, fields in wanted.items():
        given = group.get(side) or {}
        for field, allowed in fields.items():
            if given.get(field) not in allowed:
                raise UnsupportedModelError(
                    f"config.json: quantization_config.config_groups.{name}.{side}.{field} = {given.get(field)!r} "
                    f"is not supported: expected one of {list(allowed)}"
                )
    if group.get("output_activations"):
        raise UnsupportedModelError(
            f"config.json: quantization_config.config_groups.{name}.output_activations = "
            f"{group['output_activations']!r} is not supported: outputs are not quantised"
        )


def required(raw: RawConfig, field: str) -> Any:
    """A field that has no default. Raises :class:`CheckpointError` naming it when absent."""
    if raw.get(field) is None:
        raise CheckpointError(f"config.json: field {field!r} is missing")
    return raw[field]


def dimension(raw: RawConfig, field: str, default: int | None = None) -> int:
    """A positive integer; absent or null means ``default``. Raises :class:`CheckpointError`."""
    value = required(raw, field) if default is None or raw.get(field) is not None else default
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json: {field} = {value!r}: expected a positive integer")
    return value


def eos_ids(raw: RawConfig, model_path: Path) -> tuple[int, ...]:
    """End-of-sequence ids: ``generation_config.json``'s where present, else ``config.json``'s."""
    value = raw.get("eos_token_id")
    path = model_path / "generation_config.json"
    if path.is_file():
        value = read_json_object(path).get("eos_token_id", value)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) for token in ids):
        raise CheckpointError(f"{model_path}: eos_token_id = {value!r}: expected an integer or a list of them")
    return tuple(ids)
