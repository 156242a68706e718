"""An FP8 checkpoint as a plain one: what the references load, whose products know no FP8."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from flashrec.errors import CheckpointError
from flashrec.models.config import checkpoint_is_fp8, read_json_object
from flashrec.models.weights import safetensors_files

_INDEX = "model.safetensors.index.json"
_SCALES = (".weight_scale", ".weight_scale_inv", ".input_scale", ".k_scale", ".v_scale")


def is_fp8(model_path: Path) -> bool:
    """Whether a checkpoint's weights are FP8 codes with scales. Raises what the engine raises for other kinds."""
    return checkpoint_is_fp8(read_json_object(model_path / "config.json"))


@contextmanager
def plain_checkpoint(model_path: Path) -> Iterator[Path]:
    """``model_path``, or while the context lasts a dequantised copy of an FP8 checkpoint."""
    if not is_fp8(model_path):
        yield model_path
        return
    with tempfile.TemporaryDirectory(prefix="flashrec-dequantized-") as directory:
        yield dequantized_copy(model_path, Path(directory) / model_path.name)


def dequantized_copy(source: Path, target: Path) -> Path:
    """Write the FP8 checkpoint ``source`` to the new directory ``target`` with float32 weights, codes x scales.

    Each weight is the exact product rounded once to float32; scales are left out, other tensors stay as they are.
    Returns ``target``. Raises :class:`CheckpointError` for codes without a scale.
    """
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors", _INDEX))
    files = safetensors_files(source)
    for path in sorted(set(files.values())):
        names = [name for name, file in files.items() if file == path and not name.endswith(_SCALES)]
        save_file({name: _plain(name, files) for name in names}, target / path.name, metadata={"format": "pt"})
    if (source / _INDEX).is_file():
        weight_map = {name: path.name for name, path in files.items() if not name.endswith(_SCALES)}
        (target / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")
    config = dict(read_json_object(target / "config.json"))
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return target


def _plain(name: str, files: dict[str, Path]) -> torch.Tensor:
    tensor = _read(name, files)
    if tensor.dtype is not torch.float8_e4m3fn:
        return tensor
    scale = next((found for suffix in ("_scale", "_scale_inv") if (found := f"{name}{suffix}") in files), None)
    if scale is None:
        raise CheckpointError(f"{files[name]}: {name} is FP8 and has no {name}_scale")
    return (tensor.double() * _read(scale, files).double().reshape(-1, 1)).float()


def _read(name: str, files: dict[str, Path]) -> torch.Tensor:
    with safe_open(files[name], framework="pt") as handle:
        tensor: torch.Tensor = handle.get_tensor(name)
        return tensor
