"""Starting the fronts, replacing one that died, and ending with them."""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType

from flashrec.errors import EngineFault
from flashrec.front.board import Board
from flashrec.front.desk import Desk
from flashrec.front.hub import Hub
from flashrec.front.link import Link
from flashrec.front.process import Post, run_front
from flashrec.front.wire import Drain
from flashrec.runtime.scheduler import Scheduler
from flashrec.server.config import ServerConfig
from flashrec.server.run import url_of

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 120.0
_QUICK_DEATH_S = 10.0
_QUICK_DEATHS = 3
"""So many deaths in a row, each before or within :data:`_QUICK_DEATH_S` of being ready, and the server gives up."""
_AT_ONCE_S = 2.0
"""How long a front may take to end that has been told to do so at once."""


@dataclass(slots=True, eq=False)
class Front:
    """One front process and what it takes to replace it. ``link`` is this process's end of its pipe; ``ready`` is when
    it began to serve, on :func:`time.monotonic`'s clock."""

    index: int
    listener: socket.socket
    process: SpawnProcess
    link: Link
    desk: Desk | None = None
    ready: float | None = None
    quick_deaths: int = 0


class Fleet:
    """The fronts of one server. They are started before the engine is there, and wait for :meth:`serve`."""

    def __init__(self, listeners: list[socket.socket], config: ServerConfig) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._config = config
        self._directory = Path(tempfile.mkdtemp(prefix="flashrec-"))
        self._metrics_dir = self._directory / "metrics"
        self._metrics_dir.mkdir()
        self._board = Board(self._context, len(listeners))
        self._signals = 0
        self._wake_read, self._wake_write = os.pipe()
        self._fronts = [self._start(index, listener) for index, listener in enumerate(listeners)]

    def serve(self, scheduler: Scheduler) -> int:
        """Serve until a signal or a fault. Returns the process's exit status: 0 after a drained shutdown, else 1.

        Raises:
            FlashRecError: a front cannot serve.
        """
        hub = Hub(scheduler, self._board, self._directory, awake=bool(self._config.busy_poll))
        with self._signals_caught():
            for front in self._fronts:
                front.desk = hub.attach(front.link)
            for front in self._fronts:
                self._await_ready(front)
            logger.info(
                "serving %s on %s, %d processes in front",
                self._config.served_model_name or scheduler.engine.config.model_path.resolve().name,
                url_of(self._fronts[0].listener),
                len(self._fronts),
            )
            status = 0
            while not self._signals and status == 0:
                self._wait(1.0)
                status = 1 if scheduler.fault is not None else self._look_after(hub)
            self._drain(hub)
            return status

    def close(self) -> None:
        """End every process and delete every file; safe at any time."""
        for front in self._fronts:
            if front.process.is_alive():
                front.process.kill()
            front.process.join()
            front.link.close()
            front.listener.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _start(self, index: int, listener: socket.socket) -> Front:
        ours, theirs = self._context.Pipe()
        post = Post(index, os.getpid(), theirs, listener, self._board, self._config, self._directory, self._metrics_dir)
        process = self._context.Process(target=run_front, args=(post,), name=f"flashrec-front-{index}", daemon=True)
        with _environment("PROMETHEUS_MULTIPROC_DIR", str(self._metrics_dir)), _inherited_as_ignored(signal.SIGINT):
            process.start()
        theirs.close()
        return Front(index, listener, process, Link(ours))

    def _look_after(self, hub: Hub) -> int:
        """Replace the fronts that have died, and end those that were given up; 1 when one dies again and again."""
        for front in self._fronts:
            assert front.desk is not None
            if front.process.exitcode is None and front.desk.gone:
                front.process.kill()
                front.process.join()
            if front.process.exitcode is not None and not self._signals:
                logger.error("front process %d ended with status %s", front.index, front.process.exitcode)
                if not self._replace(front, hub):
                    return 1
            elif front.ready is None and front.desk.ready.done() and front.desk.ready.exception() is None:
                front.ready = time.monotonic()
        return 0

    def _replace(self, front: Front, hub: Hub) -> bool:
        """A front has died: its connections are lost, its requests are cancelled, another one takes its socket."""
        assert front.desk is not None
        lived = 0.0 if front.ready is None else time.monotonic() - front.ready
        deaths = front.quick_deaths + 1 if lived < _QUICK_DEATH_S else 0
        hub.detach(front.desk)
        self._board.held[front.index] = 0
        if deaths >= _QUICK_DEATHS:
            logger.critical("front process %d died %d times soon after its start, shutting down", front.index, deaths)
            return False
        fresh = self._start(front.index, front.listener)
        front.process, front.link, front.ready, front.quick_deaths = fresh.process, fresh.link, None, deaths
        front.desk = hub.attach(front.link)
        return True

    def _await_ready(self, front: Front) -> None:
        assert front.desk is not None
        try:
            front.desk.ready.result(_START_TIMEOUT_S)
        except TimeoutError:
            raise EngineFault(f"front process {front.index} did not serve within {_START_TIMEOUT_S:g} s") from None
        front.ready = time.monotonic()

    def _drain(self, hub: Hub) -> None:
        """Let the fronts finish what they hold, then end. A second signal ends them at once."""
        self._tell(Drain())
        for front in self._fronts:
            front.listener.close()  # with the front's own copy the last one goes: nobody connects to a dead queue
        patience = time.monotonic() + math.ceil(self._config.drain_timeout_s) + 5.0
        told = False
        while self._wait(max(0.0, patience - time.monotonic())) and time.monotonic() < patience:
            if self._signals > 1 and not told:
                told = True
                patience = time.monotonic() + _AT_ONCE_S
                self._tell(Drain(at_once=True))
        hub.scheduler.drain(0.0)
        hub.close()
        hub.scheduler.close()

    def _tell(self, message: Drain) -> None:
        for front in self._fronts:
            if front.desk is not None:
                front.desk.send(message)

    def _wait(self, timeout: float) -> bool:
        """Until a front ends, a signal comes, or time is up; at once, and ``False``, where no front is alive."""
        alive = [front.process.sentinel for front in self._fronts if front.process.exitcode is None]
        if alive and self._wake_read in wait([*alive, self._wake_read], timeout):
            os.read(self._wake_read, 64)
        return bool(alive)

    @contextlib.contextmanager
    def _signals_caught(self) -> Iterator[None]:
        previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        os.write(self._wake_write, b"!")


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextlib.contextmanager
def _inherited_as_ignored(number: signal.Signals) -> Iterator[None]:
    """A process started in here ignores the signal until it says otherwise: an interrupt while it imports is none of
    its business, its parent will tell it what to do."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)
