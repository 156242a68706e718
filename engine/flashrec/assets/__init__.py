"""Files that ship with the package."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def tiny_shop() -> Path:
    """The bundled checkpoint: a small Qwen3 trained on a synthetic shop, with its catalog and held-out users."""
    return Path(str(files(__package__))) / "tiny-shop"
