"""The serving process: with fronts, or speaking HTTP itself."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType

from flashrec.config import EngineConfig
from flashrec.server.config import ServerConfig
from flashrec.server.run import bind, claim, load_scheduler, serve_alone

_CORES_PER_FRONT = 2
_FRONTS = 8
"""Four fronts lost half of the goodput at four times an H200's capacity (16 cores, 2026-12-01), eight none, and cost
closed loops nothing: see docs/performance.md. Hosts of fewer cores were not measured."""

_CORES_TO_POLL = 8
"""Cores from which on one may be kept awake for a lone request."""


def serve(engine_config: EngineConfig, config: ServerConfig) -> int:
    """Load a checkpoint and serve it until SIGTERM, SIGINT or an engine fault.

    Returns the process's exit status: 0 after a drained shutdown, 1 after an engine fault.

    Raises:
        ConfigError: the port is taken, or the prompt template is not valid.
        FlashRecError: the checkpoint or the catalog cannot be loaded, or a front process cannot serve.
    """
    count = _fronts_by_default(engine_config) if config.http_processes is None else config.http_processes
    poll = _polls_by_default(engine_config) if config.busy_poll is None else config.busy_poll
    config = replace(config, http_processes=count, busy_poll=poll)
    if count == 0:
        return serve_alone(engine_config, config)
    from flashrec.front.fleet import Fleet

    listeners = bind_shared(config.host, config.port, count)
    with claim(listeners[0]), ended_by_sigterm(), contextlib.closing(Fleet(listeners, config)) as fleet:
        return fleet.serve(load_scheduler(engine_config))


def _fronts_by_default(engine_config: EngineConfig) -> int:
    """Enough for what a device can answer; one on a CPU, where sockets beside the engine cost a quarter of its goodput
    at four times its capacity (two cores, 2026-11-30)."""
    cores = _cores()
    if engine_config.torch_device.type == "cuda":
        return min(_FRONTS, cores // _CORES_PER_FRONT)
    return 1 if cores > 1 else 0


def _polls_by_default(engine_config: EngineConfig) -> bool:
    """On a CPU the engine's threads want every core."""
    return engine_config.torch_device.type == "cuda" and _cores() >= _CORES_TO_POLL


def _cores() -> int:
    """Those that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the process in order, while it loads: its children go with it and leave no files behind."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def bind_shared(host: str, port: int, count: int) -> list[socket.socket]:
    """``count`` sockets on one port, among which the kernel spreads new connections. Raises :class:`ConfigError`."""
    # A first socket that shares with nobody: two servers on one port would each get some of the connections.
    with bind(host, port) as probe:
        address = probe.getsockname()
    return [bind(host, address[1], shared=True) for _ in range(count)]
