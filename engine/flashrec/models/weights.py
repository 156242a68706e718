"""Filling a model from safetensors, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from rich.progress import track
from safetensors import SafetensorError, safe_open

from flashrec.errors import CheckpointError
from flashrec.layers.weight import WeightTarget
from flashrec.models.base import CausalLM
from flashrec.models.config import read_json_object

MAX_LISTED = 20
FLOATS = ("F32", "BF16", "F16")
KV_SCALES = (".self_attn.k_scale", ".self_attn.v_scale")
"""Scales of an FP8 cache, which any checkpoint may hold."""
FP8_EXTRA = ".input_scale"
"""What an FP8 checkpoint may hold beside its weights' own scales; dynamic activations do not use it."""


def safetensors_files(model_path: Path) -> dict[str, Path]:
    """The file of every tensor name. Raises :class:`CheckpointError` when files are absent or unreadable."""
    index = model_path / "model.safetensors.index.json"
    if index.is_file():
        names = read_json_object(index).get("weight_map")
        if not isinstance(names, dict):
            raise CheckpointError(f"{index}: no weight_map, the object that names each tensor's file")
        files = {name: model_path / file for name, file in names.items()}
    else:
        single = model_path / "model.safetensors"
        if not single.is_file():
            raise CheckpointError(f"{model_path}: neither model.safetensors nor its index; only safetensors are read")
        with _opened(single) as handle:
            files = dict.fromkeys(handle.keys(), single)
    absent = sorted({str(path) for path in files.values() if not path.is_file()})
    if absent:
        raise CheckpointError(f"{model_path}: shards named by the index are absent: {', '.join(absent)}")
    return files


def load_weights(model: CausalLM, model_path: Path, *, progress: bool) -> None:
    """Copy every checkpoint tensor into place; one tensor at a time is held beside the model (SPEC M10).

    Raises:
        CheckpointError: one error that lists all missing, unexpected and misshapen tensors.
    """
    files = safetensors_files(model_path)
    targets = {name: target for target in model.targets() for name in (target.name, *target.aliases)}
    problems = _missing(model, files) + _unexpected(model, targets, files)
    wanted = sorted(((files[name], name) for name in files if name in targets), key=str)
    with ExitStack() as stack:
        handles = {path: stack.enter_context(_opened(path)) for path in sorted(set(files.values()))}
        for path, name in wanted:
            problems += _fit(targets[name], name, handles[path])
        if problems:
            raise CheckpointError(_listed(model_path, problems))
        for path, name in track(wanted, description="loading weights", disable=not progress):
            targets[name].store(handles[path].get_tensor(name))
        _check_tied_head(model, files, handles)


def kv_scales(model_path: Path, num_layers: int) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Per-layer scales of keys and values, or ``None`` where the checkpoint has none (SPEC M12).

    Raises:
        CheckpointError: it has some, but not of every layer; or one is no positive number.
    """
    files = safetensors_files(model_path)
    names = [[f"model.layers.{layer}{kind}" for layer in range(num_layers)] for kind in KV_SCALES]
    absent = [name for kind in names for name in kind if name not in files]
    if len(absent) == 2 * num_layers:
        return None
    if absent:
        raise CheckpointError(_listed(model_path, [f"missing {name}, which other layers have" for name in absent]))
    keys, values = (tuple(_scale(files[name], name) for name in kind) for kind in names)
    return keys, values


def _scale(path: Path, name: str) -> float:
    with _opened(path) as handle:
        tensor = handle.get_tensor(name)
    scale = float(tensor) if tensor.numel() == 1 else math.nan
    if not (math.isfinite(scale) and scale > 0):
        raise CheckpointError(f"{path}: {name} = {tensor.tolist()!r}: expected one positive number")
    return scale


def _opened(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a readable safetensors file ({error})") from None


def _missing(model: CausalLM, files: dict[str, Path]) -> list[str]:
    return [
        f"missing {target.name} {list(target.shape)}"
        for target in model.targets()
        if not any(name in files for name in (target.name, *target.aliases))
    ]


def _unexpected(model: CausalLM, targets: dict[str, WeightTarget], files: dict[str, Path]) -> list[str]:
    allowed = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    extra = (*KV_SCALES, FP8_EXTRA) if model.config.fp8 else KV_SCALES
    return [
        f"unexpected {name}"
        for name in sorted(files)
        if name not in targets and name not in allowed and not name.endswith(extra)
    ]


def _fit(target: WeightTarget, name: str, handle: safe_open) -> Iterator[str]:
    view = handle.get_slice(name)
    shape = tuple(view.get_shape())
    if not target.accepts(shape):
        yield f"{name} has shape {list(shape)}, expected {list(target.shape)}"
    stored = view.get_dtype()
    if (stored == "F8_E4M3") != (target.dtype is torch.float8_e4m3fn):
        yield f"{name} has type {stored}, which config.json's quantization_config does not say"
    elif target.dtype is None and stored not in FLOATS:
        yield f"{name} has type {stored}, expected one of {', '.join(FLOATS)}"


def _check_tied_head(model: CausalLM, files: dict[str, Path], handles: dict[Path, safe_open]) -> None:
    """A tied checkpoint may carry its head, if it is the embedding."""
    if not model.config.tie_word_embeddings or "lm_head.weight" not in files:
        return
    head = handles[files["lm_head.weight"]].get_tensor("lm_head.weight")
    embedding = model.lm_head()
    if head.shape != embedding.shape or not torch.equal(head.to(embedding), embedding):
        raise CheckpointError(
            f"{files['lm_head.weight']}: lm_head.weight differs from model.embed_tokens.weight, "
            "but config.json says tie_word_embeddings = true"
        )


def _listed(model_path: Path, problems: list[str]) -> str:
    shown = "; ".join(problems[:MAX_LISTED])
    more = f"; and {len(problems) - MAX_LISTED} more" if len(problems) > MAX_LISTED else ""
    return f"{model_path}: {len(problems)} tensors do not fit config.json: {shown}{more}"
