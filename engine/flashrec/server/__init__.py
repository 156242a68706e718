"""The HTTP server: SGLang- and OpenAI-compatible endpoints over one scheduler."""

from __future__ import annotations

from flashrec.server.app import create_app
from flashrec.server.config import ServerConfig
from flashrec.server.run import serve

__all__ = ["ServerConfig", "create_app", "serve"]
