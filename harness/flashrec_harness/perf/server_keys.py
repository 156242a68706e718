"""What a measured server says of itself, as hard keys: its device, its engine's flags and its catalog."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from flashrec import EngineConfig

NEEDED = ("engine.device_name", "engine_config", "catalog", "server")
"""Fields of ``/server_info`` without which two servers cannot be told apart."""
_SERVER_FLAGS = ("http_processes", "max_in_flight")
_MACHINE = ("device", "device_memory_mib", "cpu_cores")


def untold(info: Mapping[str, Any]) -> list[str]:
    """The fields of :data:`NEEDED` that a server's ``/server_info`` lacks."""
    return [name for name in NEEDED if not _has(info, *name.split("."))]


def _has(info: Mapping[str, Any], name: str, *inside: str) -> bool:
    return name in info and (not inside or _has(info[name], *inside))


def of_server(hard: Mapping[str, Any], info: Mapping[str, Any], url: str) -> dict[str, Any]:
    """The client's hard keys as those of the server at ``url`` whose ``/server_info`` is ``info``.

    What the client says of its own machine is kept as the client's. A server's flags are those that differ from the
    defaults, so that a new flag does not part it from its past. A server that does not say what it runs is told from
    others by its URL alone.
    """
    ours = {f"client {name}" if name in _MACHINE else name: value for name, value in hard.items()}
    if untold(info):
        return ours | {"server": url, "device": "unknown"}
    flags = {f"server {name}": info["server"].get(name) for name in _SERVER_FLAGS}
    flags |= {f"server {name}": value for name, value in info["engine_config"].items() if value != _DEFAULTS.get(name)}
    catalog = info["catalog"] and info["catalog"]["digest"]
    return ours | flags | {"server catalog": catalog, "device": info["engine"]["device_name"]}


_DEFAULTS = json.loads(
    json.dumps({name: field.default for name, field in EngineConfig.model_fields.items()}, default=str)
)
