"""A process that serves HTTP: socket, engine, signals, exit status."""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from flashrec.config import EngineConfig
from flashrec.errors import ConfigError
from flashrec.server.app import Application, create_app
from flashrec.server.config import ServerConfig
from flashrec.server.hosts import bracketed
from flashrec.server.protocol import impatient

if TYPE_CHECKING:
    from flashrec.runtime.scheduler import Scheduler

logger = logging.getLogger(__name__)


def load_scheduler(engine_config: EngineConfig) -> Scheduler:
    """A running scheduler for a checkpoint. Raises :class:`FlashRecError` where it cannot be loaded."""
    from flashrec.runtime.engine import Engine
    from flashrec.runtime.scheduler import Scheduler

    logger.info("loading %s on %s", engine_config.model_path, engine_config.torch_device)
    scheduler = Scheduler(Engine(engine_config))
    scheduler.start()
    return scheduler


def serve_alone(engine_config: EngineConfig, config: ServerConfig) -> int:
    """Serve from this process alone; see :func:`flashrec.front.serve.serve`."""
    listener = bind(config.host, config.port)
    try:
        guard = claim(listener)
        scheduler = load_scheduler(engine_config)
        app = create_app(scheduler, config)
    except BaseException:
        listener.close()
        raise
    server = DrainingServer(app, config)
    logger.info("serving %s on %s", app.context.model_name, url_of(listener))
    with guard:
        server.run(sockets=[listener])
    return 1 if app.context.lifecycle.fault is not None else 0


def _uvicorn_config(app: Application, config: ServerConfig) -> uvicorn.Config:
    """uvicorn without its own logs and headers; it waits for running requests as long as ``config`` says."""
    return uvicorn.Config(
        app.asgi,
        http=impatient(config.body_timeout_s),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="on",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=math.ceil(config.drain_timeout_s),
    )


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A bound socket, taken before the checkpoint is loaded; ``shared`` with others of this port.

    Raises :class:`ConfigError`.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"host: cannot listen on {host}: {error.strerror}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(f"port: cannot listen on {host}:{port}: {error.strerror}; choose another --port") from None
    return listener


def claim(listener: socket.socket) -> socket.socket:
    """What only one server of this machine can hold for a listener's address.

    A bound socket alone lets another one bind as well until it listens, which is after the checkpoint has been loaded.
    Raises :class:`ConfigError`.
    """
    guard = socket.socket(socket.AF_UNIX)
    try:
        guard.bind(f"\0flashrec/{url_of(listener)}")  # abstract: it goes with the process
    except OSError:
        guard.close()
        raise ConfigError(f"port: another server is starting on {url_of(listener)}") from None
    return guard


def url_of(listener: socket.socket) -> str:
    """Where a listener is reached."""
    host, port = listener.getsockname()[:2]
    return f"http://{bracketed(host)}:{port}"


class DrainingServer(uvicorn.Server):
    """Ends with the process's own exit status after a signal, where uvicorn would raise the signal again."""

    def __init__(self, app: Application, config: ServerConfig) -> None:
        super().__init__(_uvicorn_config(app, config))
        self._lifecycle, self._metrics = app.context.lifecycle, app.context.metrics
        self._lifecycle.on_fault = self.drain
        self.on_started: Callable[[], None] = lambda: None
        """Called when connections are taken."""

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            super().run(sockets)
        finally:
            self._metrics.settle()  # what the loop has not come to

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: drain. Second: stop waiting."""
        self.drain(at_once=self.should_exit)

    def drain(self, *, at_once: bool = False) -> None:
        """Take no new request, finish those in hand and end; ``at_once``: do not even finish them. From any thread."""
        self._lifecycle.draining = True
        self.force_exit = at_once
        self.should_exit = True
