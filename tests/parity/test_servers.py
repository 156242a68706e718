"""Servers that a suite starts: health, time-out, log tail, one recorded retry, the whole group ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from flashrec_harness.servers import (
    PortTakenError,
    ServerStartError,
    StartMemoryError,
    free_port,
    started_server,
)

SERVER = """
    import http.server, signal, subprocess, sys, time
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background of a script hand it down ignored
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("child", child.pid, flush=True)
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200); self.end_headers()
        def log_message(self, *_): pass
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def python(program: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(program)]


def alive(pid: int) -> bool:
    """Whether ``pid`` runs; a process that nobody has waited for is not alive."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_server_is_healthy_inside_the_block_and_its_whole_group_gone_after(tmp_path: Path) -> None:
    with started_server(lambda port: [*python(SERVER), str(port)], name="toy", log_dir=tmp_path) as server:
        assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200
        child = int(server.log_tail().split()[1])
        assert alive(server.process.pid)
        assert alive(child)
        assert server.retries == []
    deadline = time.monotonic() + 5
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(server.process.pid)
    assert not alive(child)


def test_the_group_is_ended_when_the_block_raises(tmp_path: Path) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        started_server(lambda port: [*python(SERVER), str(port)], name="toy", log_dir=tmp_path) as server,
    ):
        raise ZeroDivisionError
    assert server.process.poll() is not None


def test_a_terminated_harness_leaves_no_server_behind(tmp_path: Path) -> None:
    harness = f"""
        import sys, time
        from pathlib import Path
        from flashrec_harness.servers import started_server
        command = {python(SERVER)!r}
        with started_server(lambda port: [*command, str(port)], name="toy", log_dir=Path(sys.argv[1])) as server:
            print(server.process.pid, flush=True)
            time.sleep(600)
    """
    with subprocess.Popen([*python(harness), str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        leader = int(process.stdout.readline())
        assert alive(leader)
        process.terminate()
        assert process.wait(timeout=20) == 128 + signal.SIGTERM
    assert not alive(leader)


def test_a_server_that_ends_early_raises_with_its_log_tail(tmp_path: Path) -> None:
    dying = python("raise SystemExit('no such checkpoint')")
    with (
        pytest.raises(ServerStartError, match=r"ended with code 1(.|\n)*no such checkpoint") as caught,
        started_server(lambda _: dying, name="toy", log_dir=tmp_path),
    ):
        pass
    assert type(caught.value) is ServerStartError
    assert len(list(tmp_path.glob("*.log"))) == 1, "a failure that is not the infrastructure's was retried"


def test_a_server_that_never_answers_is_ended_at_the_time_out(tmp_path: Path) -> None:
    silent = python("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    with (
        pytest.raises(ServerStartError, match="not healthy within 1 s"),
        started_server(lambda _: silent, name="toy", log_dir=tmp_path, timeout_s=1.0),
    ):
        pass
    (log,) = tmp_path.glob("*.log")
    assert not alive(int(log.read_text(encoding="utf-8").split()[0]))


@pytest.mark.parametrize(
    ("first", "error"),
    [
        ("raise OSError(98, 'Address already in use')", PortTakenError),
        ("raise MemoryError('out of memory at start')", StartMemoryError),
    ],
)
def test_an_infrastructure_failure_is_retried_once_and_recorded(
    tmp_path: Path, first: str, error: type[ServerStartError]
) -> None:
    attempts: list[int] = []

    def fails_once(port: int) -> Sequence[str]:
        attempts.append(port)
        return python(first) if len(attempts) == 1 else [*python(SERVER), str(port)]

    with started_server(fails_once, name="toy", log_dir=tmp_path) as server:
        assert len(attempts) == 2
        (retry,) = server.retries
        assert retry.startswith(error.__name__)

    with pytest.raises(error), started_server(lambda _: python(first), name="toy", log_dir=tmp_path):
        pass


def test_a_killed_server_counts_as_out_of_memory(tmp_path: Path) -> None:
    killed = python("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(StartMemoryError), started_server(lambda _: killed, name="toy", log_dir=tmp_path):
        pass


def test_a_free_port_can_be_bound() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))


def test_the_server_gets_the_environment_it_is_given(tmp_path: Path) -> None:
    printing = python("import os; raise SystemExit(os.environ['FLASHREC_TOY'] + os.environ['PATH'])")
    with (
        pytest.raises(ServerStartError, match=f"gift{os.environ['PATH'][:20]}"),
        started_server(lambda _: printing, name="toy", env={"FLASHREC_TOY": "gift"}, log_dir=tmp_path),
    ):
        pass
