"""Who serves at a URL: the processes that a measurement of a running server does not take for strangers."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection

from flashrec_harness.servers import processes_behind

_LISTEN = (
    "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
)


def listen(pipe: Connection, listener: socket.socket) -> None:
    """A front: it listens on a socket that its parent bound."""
    listener.listen()
    pipe.send(os.getpid())
    pipe.recv()


def test_a_server_alone_is_its_process_and_not_the_one_that_started_it() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _LISTEN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        assert processes_behind(f"http://127.0.0.1:{port}") == {server.pid}
        assert processes_behind(f"http://localhost:{port}/") == {server.pid}
        assert processes_behind(f"http://192.0.2.1:{port}") == frozenset()
        server.communicate("\n")
    assert processes_behind(f"http://127.0.0.1:{port}") == frozenset()


def test_a_front_stands_for_the_engine_s_process() -> None:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        front = spawn.Process(target=listen, args=(theirs, listener))
        front.start()
        try:
            assert ours.recv() == front.pid
            assert processes_behind(f"http://127.0.0.1:{listener.getsockname()[1]}") >= {front.pid, os.getpid()}
        finally:
            ours.send(None)
            front.join()
