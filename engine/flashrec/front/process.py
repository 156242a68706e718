"""A front process: the whole HTTP application, over the scheduler of another process."""

from __future__ import annotations

import gc
import logging
import socket
import sys
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from flashrec.errors import FlashRecError
from flashrec.front.board import Board
from flashrec.front.remote import RemoteScheduler
from flashrec.front.wire import Drain, Hello, Link, LinkClosed, Ready, Serve
from flashrec.logs import configure_logging
from flashrec.profiler import trace_range
from flashrec.runtime.loading import load_tokenizer
from flashrec.server.app import create_app
from flashrec.server.config import ServerConfig
from flashrec.server.context import Context
from flashrec.server.lifecycle import Places
from flashrec.server.run import DrainingServer, uvicorn_config

logger = logging.getLogger(__name__)

_SMALL_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Post:
    """What a front is given at its birth; everything else comes over the pipe."""

    index: int
    connection: Connection
    listener: socket.socket
    board: Board
    config: ServerConfig
    metrics_dir: Path


def run_front(post: Post) -> None:
    """Serve until told to drain, or until the engine's process has gone. The process's entry point."""
    configure_logging()
    link = Link(post.connection)
    try:
        hello, serve = link.receive()
    except (LinkClosed, KeyboardInterrupt):
        sys.exit(1)
    assert isinstance(hello, Hello)
    assert isinstance(serve, Serve)
    try:
        scheduler = RemoteScheduler(link, hello, load_tokenizer(hello.engine_config.model_path), post.board)
        scheduler.hear(serve)
        app = create_app(
            scheduler,
            post.config,
            places=Places(post.board.held, post.index),
            metrics_dir=post.metrics_dir,
            small_bytes=_SMALL_BYTES,
        )
    except FlashRecError as error:
        link.send(Ready(error))
        sys.exit(1)
    context: Context = app.state.context
    server = DrainingServer(uvicorn_config(app, post.config), context)
    server.on_started = lambda: link.send(Ready())
    scheduler.lost = context.lifecycle.report_fault
    trace_range.watch = scheduler.show
    threading.Thread(target=_hear, args=(link, scheduler, server), name="flashrec-hear", daemon=True).start()
    gc.collect()
    gc.freeze()
    server.run(sockets=[post.listener])
    sys.exit(0 if context.lifecycle.fault is None else 1)


def _hear(link: Link, scheduler: RemoteScheduler, server: DrainingServer) -> None:
    try:
        while True:
            for message in link.receive():
                if isinstance(message, Drain):
                    server.drain(at_once=message.at_once)
                else:
                    scheduler.hear(message)
    except LinkClosed:
        scheduler.lose()
