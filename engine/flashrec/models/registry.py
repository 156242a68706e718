"""From ``config.json``'s ``architectures`` to the class that runs it. A new model is one line here."""

from __future__ import annotations

from flashrec.errors import UnsupportedModelError
from flashrec.models.base import CausalLM
from flashrec.models.config import RawConfig
from flashrec.models.qwen3 import Qwen3ForCausalLM

MODELS: dict[str, type[CausalLM]] = {
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}


def model_class(raw: RawConfig) -> type[CausalLM]:
    """The class registered for the checkpoint. Raises :class:`UnsupportedModelError` when there is none."""
    architectures = raw.get("architectures") or []
    for name in architectures:
        if name in MODELS:
            return MODELS[name]
    raise UnsupportedModelError(
        f"config.json: architectures = {architectures!r} is not supported: expected one of {sorted(MODELS)}"
    )
