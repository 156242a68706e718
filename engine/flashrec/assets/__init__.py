"""The checkpoint that comes with the package."""

from __future__ import annotations

from pathlib import Path


def tiny_shop() -> Path:
    """Directory of a trained Qwen3 of 0.8 M parameters with its tokenizer, catalog, titles and test histories."""
    return Path(__file__).parent / "tiny-shop"
