"""The server's settings, apart from the engine's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flashrec.errors import ConfigError
from flashrec.server.hosts import check_allowed


def _default_port() -> int:
    text = os.environ.get("PORT", "8000")
    if not text.isdecimal():
        raise ConfigError(f"PORT: must be a port number, got {text!r}")
    return int(text)


def _default_api_key() -> str | None:
    return os.environ.get("FLASHREC_API_KEY") or None


def _default_profiler_dir() -> Path:
    return Path(os.environ.get("FLASHREC_TORCH_PROFILER_DIR") or "profiles")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How the server listens, what it refuses, and how long it waits.

    Raises:
        ConfigError: a value is out of range; the message names the field.
    """

    host: str = "127.0.0.1"
    port: int = field(default_factory=_default_port)
    """0 picks a free port. Default: ``PORT``, else 8000."""
    allowed_hosts: Sequence[str] = ()
    """Names in ``Host`` that are answered beside this machine's own, without a port; ``*`` for any: see
    :mod:`flashrec.server.hosts`. Default: none on a loopback address, any on another."""
    api_key: str | None = field(default_factory=_default_api_key, repr=False)
    """Clients send ``Authorization: Bearer KEY``. Default: ``FLASHREC_API_KEY``, else none is asked for."""
    served_model_name: str | None = None
    """Name in ``/v1/models``. Default: the last part of the model's path."""
    prompt_template: Path | None = None
    """Jinja template of ``/v1/recommend``'s prompt: see :mod:`flashrec.server.prompts`."""
    profiler_dir: Path = field(default_factory=_default_profiler_dir)
    """The only directory that traces go to. Default: ``FLASHREC_TORCH_PROFILER_DIR``, else ``./profiles``."""
    catalog_dir: Path | None = None
    """The only directory that ``/catalog`` loads from. Default: none, and ``/catalog`` loads nothing."""
    request_timeout_s: float = 60.0
    """Deadline of a request that names none, and the latest one it may name."""
    body_timeout_s: float = 30.0
    """How long a client may take to send a request's head, then its body, and may pause while it reads the answer."""
    drain_timeout_s: float = 30.0
    """How long shutdown waits for the requests that are running."""
    max_body_bytes: int = 4 << 20
    max_in_flight: int = 1024
    """Requests held at once, before and in the queue; more are answered 503."""
    max_prompts: int = 256
    """Prompts in one request that holds a list of them."""
    retry_after_s: int = 1
    """``Retry-After`` of a 503."""
    workers: int = 4
    """Threads for tokenisation and JSON, in each process that serves."""
    http_processes: int | None = None
    """Processes that speak HTTP in front of the engine's; 0 is none, and the engine's own process does. Default:
    beside a GPU one per two cores, at most 8; on a CPU 1, of a single core 0."""
    busy_poll: bool | None = None
    """Keep a process in front awake while it holds the server's only request, and the engine's thread for a while after
    its answer: see :mod:`flashrec.front.polling` and :mod:`flashrec.front.ear`. Default: beside a GPU on 8 cores or
    more."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port: must lie in 0 to 65535, got {self.port}")
        for name in (
            "request_timeout_s",
            "body_timeout_s",
            "drain_timeout_s",
            "max_body_bytes",
            "max_in_flight",
            "max_prompts",
            "retry_after_s",
            "workers",
        ):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: must be above 0, got {getattr(self, name)}")
        if self.http_processes is not None and not 0 <= self.http_processes <= 64:
            raise ConfigError(f"http_processes: must lie in 0 to 64, got {self.http_processes}")
        check_allowed(self.allowed_hosts)
        if self.api_key is not None and (not self.api_key.isascii() or self.api_key.strip() != self.api_key):
            raise ConfigError("api_key: must be ASCII without spaces around it")
        if self.catalog_dir is not None and not self.catalog_dir.is_dir():
            raise ConfigError(f"catalog_dir: no such directory: {self.catalog_dir}")
        if self.prompt_template is not None and not self.prompt_template.is_file():
            raise ConfigError(f"prompt_template: no such file: {self.prompt_template}")
