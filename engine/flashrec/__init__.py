"""FlashRec: beam-search inference for generative recommendation."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashrec.config import EngineConfig
    from flashrec.errors import FlashRecError, RequestError
    from flashrec.request import Beam, Request, Result, ScoreSpace
    from flashrec.runtime.engine import Engine

__all__ = ["Beam", "Engine", "EngineConfig", "FlashRecError", "Request", "RequestError", "Result", "ScoreSpace"]
__version__ = "0.1.0"

_HOMES = {
    "Beam": "request",
    "Engine": "runtime.engine",
    "EngineConfig": "config",
    "FlashRecError": "errors",
    "Request": "request",
    "RequestError": "errors",
    "Result": "request",
    "ScoreSpace": "request",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: ``--help`` and an error class need no torch, which takes seconds."""
    if name not in _HOMES:
        raise AttributeError(f"module 'flashrec' has no attribute {name!r}")
    return getattr(importlib.import_module(f"flashrec.{_HOMES[name]}"), name)
