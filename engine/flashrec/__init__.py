"""FlashRec: beam-search inference for generative recommendation."""

from flashrec.config import EngineConfig
from flashrec.errors import FlashRecError, RequestError
from flashrec.request import Beam, Request, Result, ScoreSpace
from flashrec.runtime.engine import Engine

__all__ = [
    "Beam",
    "Engine",
    "EngineConfig",
    "FlashRecError",
    "Request",
    "RequestError",
    "Result",
    "ScoreSpace",
]
__version__ = "0.1.0"
