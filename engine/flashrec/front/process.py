"""A front process: the whole HTTP application, over the scheduler of another process."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from prometheus_client import values

from flashrec.errors import EngineFault, FlashRecError
from flashrec.front.board import Board
from flashrec.front.link import Link, LinkClosed
from flashrec.front.polling import BusyPolling
from flashrec.front.remote import RemoteScheduler
from flashrec.front.wire import Drain, Hello, Ready, Serve
from flashrec.logs import configure_logging
from flashrec.profiler import trace_range
from flashrec.runtime.loading import load_tokenizer
from flashrec.server.app import create_app
from flashrec.server.config import ServerConfig
from flashrec.server.lifecycle import Places
from flashrec.server.run import DrainingServer

logger = logging.getLogger(__name__)

_SMALL_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Post:
    """What a front is given at its birth; everything else comes over the pipe.

    ``engine`` is the engine's process, which deletes ``directory`` when it ends, unless it is killed.
    """

    index: int
    engine: int
    connection: Connection
    listener: socket.socket
    board: Board
    config: ServerConfig
    directory: Path
    metrics_dir: Path


def run_front(post: Post) -> None:
    """Serve until told to drain, or until the engine's process has gone. The process's entry point."""
    configure_logging()
    # A front counts on in the files of the one that it replaces: they would pile up under its process id.
    values.ValueClass = values.MultiProcessValue(lambda: post.index)
    link = Link(post.connection)
    try:
        hello, serve, *news = link.receive()
    except LinkClosed:
        _tidy(post)
        sys.exit(1)
    assert isinstance(hello, Hello)
    assert isinstance(serve, Serve)
    try:
        scheduler = RemoteScheduler(link, hello, load_tokenizer(hello.engine_config.model_path), post.board)
        scheduler.hear(serve)
        places = Places(post.board.held, post.index)
        app = create_app(
            scheduler,
            post.config,
            places=places,
            metrics_dir=post.metrics_dir,
            small_bytes=_SMALL_BYTES,
        )
    except FlashRecError as error:
        link.send(Ready(error))
        sys.exit(1)
    server = DrainingServer(app, post.config)
    server.on_started = lambda: _begin(link, scheduler, server, places if post.config.busy_poll else None, news)
    scheduler.lost = app.context.lifecycle.report_fault
    trace_range.watch = scheduler
    gc.collect()
    gc.freeze()
    server.run(sockets=[post.listener])
    _tidy(post)
    sys.exit(0 if app.context.lifecycle.fault is None else 1)


def _tidy(post: Post) -> None:
    """Delete the server's files where the engine's process can no longer do it."""
    if os.getppid() != post.engine:
        shutil.rmtree(post.directory, ignore_errors=True)


def _begin(
    link: Link, scheduler: RemoteScheduler, server: DrainingServer, places: Places | None, news: Sequence[Any]
) -> None:
    """Hear the engine's process on the event loop, which a thread would have to wake, and say that this one serves.

    With ``places``, stay awake for a lone request. ``news`` came with the first messages.
    """
    loop = asyncio.get_running_loop()
    if places is not None:
        BusyPolling(loop, places)

    def heard() -> None:
        try:
            hear(link.arrived())
        except LinkClosed:
            end(EngineFault("the engine's process has gone"))
        except Exception as error:
            logger.exception("what the engine's process says cannot be read, or not be acted on")
            end(
                EngineFault(f"this front cannot act on what the engine's process says: {type(error).__name__}: {error}")
            )

    def end(fault: EngineFault) -> None:
        loop.remove_reader(link.fileno())
        link.close()
        scheduler.lose(fault)

    def hear(messages: Sequence[Any]) -> None:
        for message in messages:
            if isinstance(message, Drain):
                server.drain(at_once=message.at_once)
            else:
                scheduler.hear(message)

    loop.add_reader(link.fileno(), heard)
    link.send(Ready())
    hear(news)
