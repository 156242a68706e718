"""An FP8 copy of a bf16 or float32 checkpoint, as published FP8 checkpoints are stored (SPEC M5)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from flashrec.kernels.quantize import quantize_weight

_INDEX = "model.safetensors.index.json"


def quantized_copy(source: Path, target: Path) -> Path:
    """Write ``source`` to the new directory ``target`` with per-channel e4m3 projections and their scales.

    A projection's scale goes into the file of its weight. Embedding, head and norms stay as they are. Returns
    ``target``.
    """
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors", _INDEX))
    weight_map: dict[str, str] = {}
    for path in sorted(source.glob("*.safetensors")):
        tensors = load_file(path)
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            codes, scale = quantize_weight(tensors[name].float())
            tensors[name], tensors[f"{name}_scale"] = codes, scale.unsqueeze(1)
        save_file(tensors, target / path.name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, path.name)
    if (source / _INDEX).is_file():
        (target / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2), encoding="utf-8")
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return target
