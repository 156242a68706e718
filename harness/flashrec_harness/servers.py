"""Servers that a suite starts itself: free port, health with a time-out, log tail, process group ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

import httpx
import psutil

from flashrec_harness.children import package_path
from flashrec_harness.planting import planted_names

HEALTH_TIMEOUT_S = 180.0
SPAWNED = "multiprocessing.spawn"
"""In the command line of a server's front process, and of no other child of it."""
_POLL_S = 0.2
_LOG_TAIL_LINES = 40
_STOP_PATIENCE_S = 10.0


class ServerStartError(RuntimeError):
    """A server did not become healthy. The message ends with the tail of its log."""


class PortTakenError(ServerStartError):
    """Another process bound the port between its choice and the server's start."""


class StartMemoryError(ServerStartError):
    """The server ran out of memory, or was killed for it, before it was healthy."""


INFRASTRUCTURE_ERRORS = (PortTakenError, StartMemoryError)
"""What may be retried once: nothing that a wrong result could cause."""


@dataclass
class RunningServer:
    """A healthy server and how it came to be. ``retries`` names each infrastructure failure before it."""

    url: str
    process: subprocess.Popen[bytes]
    log_path: Path
    command: tuple[str, ...]
    retries: list[str] = field(default_factory=list)

    def log_tail(self, lines: int = _LOG_TAIL_LINES) -> str:
        return log_tail(self.log_path, lines)


def free_port() -> int:
    """A TCP port on the loopback interface that nothing listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def processes_behind(url: str) -> frozenset[int]:
    """Process ids of the server at a URL, as far as they can be seen here: those that listen on its port, with their
    children, and with the parents of those that a parent spawned to listen in its stead. None of another machine's.
    """
    parts = urlsplit(url)
    if not _is_here(parts.hostname or ""):
        return frozenset()
    port = parts.port or (443 if parts.scheme == "https" else 80)
    found = set[int]()
    for one in psutil.net_connections("tcp"):
        # A listener of the first process is whoever it starts for a connection: all others would be its children.
        if one.status == psutil.CONN_LISTEN and one.laddr.port == port and one.pid not in (None, 1):
            with suppress(psutil.Error):
                listener = psutil.Process(one.pid)
                spawned = SPAWNED in " ".join(listener.cmdline())
                family = (listener, *listener.children(recursive=True), *([listener.parent()] if spawned else []))
                found |= {member.pid for member in family if member is not None}
    return frozenset(found)


def _is_here(host: str) -> bool:
    """Whether a host's address is one of this machine's: whoever can bind it is here."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def log_tail(path: Path, lines: int = _LOG_TAIL_LINES) -> str:
    if not path.exists():
        return "(no log)"
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


@contextmanager
def started_server(
    command: Callable[[int], Sequence[str]],
    *,
    name: str,
    health_path: str = "/health",
    env: Mapping[str, str] | None = None,
    log_dir: Path | None = None,
    timeout_s: float = HEALTH_TIMEOUT_S,
) -> Iterator[RunningServer]:
    """Run ``command(port)`` until the block ends.

    ``env`` is added to this process's environment. One retry follows an :data:`INFRASTRUCTURE_ERRORS`
    failure and is recorded in :attr:`RunningServer.retries`; any other failure raises at once.

    Raises:
        ServerStartError: the process ended, or was not healthy within ``timeout_s``.
    """
    directory = log_dir or Path(tempfile.mkdtemp(prefix=f"{name}-"))
    directory.mkdir(parents=True, exist_ok=True)
    retries: list[str] = []
    with _exit_on_terminate():
        try:
            server = _start(command, name, health_path, env, directory, timeout_s)
        except INFRASTRUCTURE_ERRORS as error:
            retries.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
            server = _start(command, name, health_path, env, directory, timeout_s)
        server.retries = retries
        try:
            yield server
        finally:
            end_process_group(server.process)


@contextmanager
def flashrec_server(
    model_path: Path,
    *,
    sid_vocab_file: Path | None = None,
    arguments: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    log_dir: Path | None = None,
    timeout_s: float = HEALTH_TIMEOUT_S,
) -> Iterator[RunningServer]:
    """``python -m flashrec serve`` with this interpreter, this checkout's packages and the faults that are planted."""
    catalog = ("--sid-vocab-file", str(sid_vocab_file)) if sid_vocab_file else ()

    def command(port: int) -> Sequence[str]:
        address = ("--host", "127.0.0.1", "--port", str(port))
        module = ("flashrec_harness.faults.child", "flashrec") if planted_names() else ("flashrec",)
        serve = (sys.executable, "-m", *module, "serve", "--model-path", str(model_path))
        return (*serve, *catalog, *address, *arguments)

    with started_server(
        command,
        name="flashrec",
        env={"PYTHONPATH": package_path(), **(env or {})},
        log_dir=log_dir,
        timeout_s=timeout_s,
    ) as server:
        yield server


def end_process_group(process: subprocess.Popen[bytes], patience_s: float = _STOP_PATIENCE_S) -> None:
    """Interrupt the whole group that ``process`` leads, then kill what is left of it.

    The group outlives its leader when a child hangs, so the kill goes to the group even when the leader
    has already gone.
    """
    _signal_group(process.pid, signal.SIGINT)
    try:
        process.wait(timeout=patience_s)
    except subprocess.TimeoutExpired:
        pass
    else:
        _await_group(process.pid, deadline=time.monotonic() + 2.0)
    _signal_group(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def _exit_on_terminate() -> Iterator[None]:
    """Let SIGTERM unwind this process: a server in a session of its own would outlive a plain death."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _start(
    command: Callable[[int], Sequence[str]],
    name: str,
    health_path: str,
    env: Mapping[str, str] | None,
    log_dir: Path,
    timeout_s: float,
) -> RunningServer:
    port = free_port()
    log_path = log_dir / f"{name}-{port}.log"
    arguments = tuple(command(port))
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
    server = RunningServer(f"http://127.0.0.1:{port}", process, log_path, arguments)
    try:
        _wait_healthy(server, name, health_path, timeout_s)
    except BaseException:
        end_process_group(process, patience_s=0.0)
        raise
    return server


def _wait_healthy(server: RunningServer, name: str, health_path: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    with httpx.Client(base_url=server.url, timeout=2.0, trust_env=False) as client:
        while time.monotonic() < deadline:
            code = server.process.poll()
            if code is not None:
                raise _start_error(name, f"ended with code {code} before it was healthy", server, code)
            try:
                if client.get(health_path).status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass  # not listening yet: the deadline decides
            time.sleep(_POLL_S)
    raise _start_error(name, f"not healthy within {timeout_s:.0f} s", server, None)


def _start_error(name: str, what: str, server: RunningServer, code: int | None) -> ServerStartError:
    tail = server.log_tail()
    kind: type[ServerStartError] = ServerStartError
    text = tail.lower()
    if "address already in use" in text or "eaddrinuse" in text:
        kind = PortTakenError
    elif code == -signal.SIGKILL or "out of memory" in text or "memoryerror" in text:
        kind = StartMemoryError
    return kind(f"{name} server {what}; log {server.log_path}:\n{tail}")


def _signal_group(leader: int, number: signal.Signals) -> None:
    try:
        os.killpg(leader, number)
    except ProcessLookupError:
        return


def _await_group(leader: int, deadline: float) -> None:
    while time.monotonic() < deadline:
        try:
            os.killpg(leader, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
