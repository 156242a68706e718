"""Command-line flags from the configuration classes, so that every flag is documented once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from flashrec.config import EngineConfig

Command = Callable[..., Any]
SERVER_FLAGS: dict[str, tuple[Any, str]] = {
    "host": (str, "address to listen on"),
    "port": (int, "port to listen on; default PORT, else 8000"),
    "allowed_hosts": (
        list[str],
        "answer to this name in Host too (repeatable), * for any; default: this machine's own names on a loopback "
        "address, any on another",
    ),
    "api_key": (str, "ask clients for this bearer token; default FLASHREC_API_KEY"),
    "served_model_name": (str, "name in /v1/models; default the directory's"),
    "prompt_template": (Path, "Jinja template of /v1/recommend's prompt"),
    "request_timeout_s": (float, "deadline of a request that names none, in seconds"),
    "drain_timeout_s": (float, "how long shutdown waits for running requests, in seconds"),
    "max_body_bytes": (int, "largest request body"),
    "catalog_dir": (Path, "the only directory that /catalog loads catalogs from; default none"),
    "profiler_dir": (
        Path,
        "the only directory that traces go to; default FLASHREC_TORCH_PROFILER_DIR, else ./profiles",
    ),
    "body_timeout_s": (float, "seconds for a client to send a head, then a body, and to go on reading an answer"),
    "max_in_flight": (int, "requests held at once, before and in the queue; more are answered 503"),
    "max_prompts": (int, "prompts in one request that holds a list of them"),
    "retry_after_s": (int, "Retry-After of a 503, in seconds"),
    "workers": (int, "threads for tokenisation and JSON, in each process that serves"),
    "http_processes": (
        int,
        "processes that speak HTTP before the engine's, 0 for none; default up to 8 by a GPU, else 1",
    ),
    "busy_poll": (
        bool,
        "keep two cores awake for a lone request, which is answered sooner; default by a GPU on 8 cores or more",
    ),
}
"""Flags of :class:`flashrec.server.config.ServerConfig`; an absent one keeps that class's default."""


def with_flags(model: type[BaseModel], *, server: bool = False) -> Callable[[Command], Command]:
    """Give a ``**flags`` command one option per field of ``model``, and the server's.

    The command's other parameters keep their place before them.
    """

    def decorate(command: Command) -> Command:
        own = [
            parameter
            for parameter in inspect.signature(command, eval_str=True).parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        added = [_model_flag(name, field) for name, field in model.model_fields.items()]
        if server:
            added += [_flag(name, kind | None, None, text) for name, (kind, text) in SERVER_FLAGS.items()]
        parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in (*own, *added)]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def engine_config(flags: dict[str, Any]) -> EngineConfig:
    """The configuration that the flags spell. Raises :class:`ConfigError`."""
    return EngineConfig(**flags)


def _model_flag(name: str, field: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if field.default is PydanticUndefined else field.default
    return _flag(name, field.annotation, default, field.description)


def _flag(name: str, annotation: Any, default: Any, text: str) -> inspect.Parameter:
    dashed = name.replace("_", "-")
    if annotation in (bool, bool | None):
        option = typer.Option(f"--{dashed}/--no-{dashed}", help=text)
    elif annotation == list[str] | None:
        option = typer.Option(f"--{dashed.removesuffix('s')}", help=text)  # given once for each entry
    else:
        option = typer.Option(f"--{dashed}", help=text)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, option]
    )
