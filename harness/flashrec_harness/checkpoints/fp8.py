"""An FP8 copy of a bf16 or float32 checkpoint, as published FP8 checkpoints are stored (SPEC M5)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from flashrec.kernels.quantize import quantize_weight

_WEIGHTS = "model.safetensors"


def quantized_copy(source: Path, target: Path) -> Path:
    """Write ``source`` to the new directory ``target`` with per-channel e4m3 projections and their scales.

    For a checkpoint in one file. Embedding, head and norms stay as they are. Returns ``target``.
    """
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(_WEIGHTS))
    tensors = load_file(source / _WEIGHTS)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        codes, scale = quantize_weight(tensors[name].float())
        tensors[name], tensors[f"{name}_scale"] = codes, scale.unsqueeze(1)
    save_file(tensors, target / _WEIGHTS, metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return target
