"""Front processes of a real server: who dies with whom, what is counted over all, and how they drain."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from server_support import error_of, wait_until, write_checkpoint
from test_server_process import Served

from flashrec.errors import ConfigError
from flashrec.front import polling
from flashrec.front.serve import bind_shared
from flashrec.server.run import bind, claim

BODY = b'{"input_ids": [1]}'
HEAD = (
    b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n" % len(BODY)
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def test_a_shared_port_is_shared_with_no_other_server() -> None:
    with bind("127.0.0.1", 0) as alone:
        alone.listen()
        port = alone.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            bind_shared("127.0.0.1", port, 2)
    sockets = bind_shared("127.0.0.1", 0, 2)
    address = sockets[0].getsockname()
    assert sockets[1].getsockname() == address
    with claim(sockets[0]), pytest.raises(ConfigError, match=f"another server is starting on .*127.0.0.1:{address[1]}"):
        claim(sockets[1])
    claim(sockets[0]).close()
    for each in sockets:
        each.listen()
    with pytest.raises(ConfigError, match="cannot listen"):
        bind("127.0.0.1", address[1])
    for each in sockets:
        each.close()


@pytest.fixture
def process(checkpoint: Path, tmp_path: Path) -> Iterator[tuple[Served, str]]:
    arguments = ["-m", "flashrec", "serve", "--model-path", str(checkpoint), "--port", "0", "--device", "cpu"]
    arguments += ["--sid-vocab-file", str(checkpoint / "items.tsv"), "--kv-pool-tokens", "4096", "--max-in-flight", "2"]
    arguments += ["--http-processes", "2", "--busy-poll", "--no-invariance-check"]
    (tmp_path / "tmp").mkdir()
    server = Served(arguments, tmp_path / "log", TMPDIR=str(tmp_path / "tmp"))
    try:
        yield server, server.url()
    finally:
        server.process.kill()
        server.process.wait()
    # Whoever ended it, and however: the last of its processes has deleted its files.
    wait_until(lambda: not list((tmp_path / "tmp").glob("flashrec-*")))


def fronts_of(server: Served) -> list[psutil.Process]:
    children = psutil.Process(server.process.pid).children()
    return [child for child in children if "spawn_main" in " ".join(child.cmdline())]


def asked(url: str, **params: Any) -> httpx.Response:
    return httpx.post(f"{url}/generate", json={"input_ids": [1, 2], "sampling_params": params}, timeout=30)


def counted(url: str) -> float:
    text = httpx.get(f"{url}/metrics").text
    return sum(
        float(line.split()[-1])
        for line in text.splitlines()
        if line.startswith('flashrec_http_requests_total{endpoint="/generate"')
    )


def test_a_front_that_dies_is_replaced_and_no_count_is_lost(process: tuple[Served, str], tmp_path: Path) -> None:
    server, url = process
    for _ in range(20):  # a connection each: both fronts get some
        assert asked(url, n=2).status_code == 200
    wait_until(lambda: counted(url) == 20)  # each front counts a little behind its answers
    victim, other = fronts_of(server)
    victim.send_signal(signal.SIGKILL)
    wait_until(lambda: re.search(r"front process \d ended with status -9", server.log.read_text()), 10)

    def replaced() -> bool:
        fronts = fronts_of(server)
        return other in fronts and len(fronts) == 2 and victim not in fronts

    wait_until(replaced, 30)
    for _ in range(20):  # what lands at the new one waits until it serves
        assert asked(url, n=2).status_code == 200
    wait_until(lambda: counted(url) == 40)
    files = sorted(file.name for file in (tmp_path / "tmp").glob("flashrec-*/metrics/*"))
    assert files == ["counter_0.db", "counter_1.db", "histogram_0.db", "histogram_1.db"]
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0, server.log.read_text()


def test_when_the_engine_s_process_is_killed_its_fronts_end(process: tuple[Served, str]) -> None:
    server, _ = process
    fronts = fronts_of(server)
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    _, alive = psutil.wait_procs(fronts, timeout=15)
    assert alive == []


def test_draining_answers_what_is_held_and_refuses_connections(process: tuple[Served, str]) -> None:
    server, url = process
    port = int(url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as slow:
        slow.sendall(HEAD + BODY[:5])
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)

        def refused() -> bool:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
            except ConnectionRefusedError:
                return True
            return False

        wait_until(refused, 10)
        slow.sendall(BODY[5:])
        slow.settimeout(20)
        assert slow.recv(4096).startswith(b"HTTP/1.1 200")
    assert server.process.wait(15) == 0, server.log.read_text()
    assert "Traceback" not in server.log.read_text()


def test_a_front_that_dies_while_the_checkpoint_loads_is_one_line(checkpoint: Path, tmp_path: Path) -> None:
    arguments = ["-m", "flashrec", "serve", "--model-path", str(checkpoint), "--port", "0", "--device", "cpu"]
    server = Served([*arguments, "--http-processes", "1"], tmp_path / "log")
    try:
        wait_until(lambda: fronts_of(server), 30)
        for front in fronts_of(server):
            front.kill()
        assert server.process.wait(60) == 2
        lines = server.log.read_text().splitlines()
        assert lines[-1] == "flashrec: a front process ended before it could serve"
        assert "Traceback" not in server.log.read_text()
    finally:
        server.process.kill()
        server.process.wait()


def test_places_are_counted_over_all_fronts(process: tuple[Served, str]) -> None:
    """``--max-in-flight 2``: two bodies that are under way fill the server, whichever fronts hold them."""
    _, url = process
    port = int(url.rpartition(":")[2])
    holders = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
    for holder in holders:
        holder.sendall(HEAD + BODY[:1])
    wait_until(lambda: httpx.get(f"{url}/server_info").json()["server"]["in_flight"] == 2)
    for _ in range(8):
        assert error_of(asked(url, n=1))["code"] == "queue_full"
    for holder in holders:
        holder.close()
    wait_until(lambda: httpx.get(f"{url}/server_info").json()["server"]["in_flight"] == 0)
    assert asked(url, n=1).status_code == 200


def test_a_front_that_stays_awake_for_a_request_sleeps_when_there_is_none(process: tuple[Served, str]) -> None:
    server, url = process
    assert httpx.get(f"{url}/server_info").json()["server"]["busy_poll"] is True
    fronts = fronts_of(server)
    for _ in range(20):
        assert asked(url, n=1).status_code == 200

    def spent() -> float:
        return sum(each.cpu_times().user + each.cpu_times().system for each in fronts)

    def idle() -> float:
        before = spent()
        time.sleep(1.0)
        return spent() - before

    assert idle() < 0.3, "of two processes in one second"
    before, holds = spent(), 8
    for _ in range(holds):
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as holder:
            holder.sendall(HEAD + BODY[:1])
            time.sleep(2 * polling._AWAKE_S)
    assert spent() - before > holds * polling._AWAKE_S / 4, "beside other processes on two cores"
    assert idle() < 0.3, "not for ever"


def test_a_template_that_no_front_can_use_stops_the_start(checkpoint: Path, tmp_path: Path) -> None:
    template = tmp_path / "broken.jinja"
    template.write_text("{{ history")
    arguments = ["-m", "flashrec", "serve", "--model-path", str(checkpoint), "--port", "0", "--device", "cpu"]
    arguments += ["--http-processes", "1", "--no-invariance-check", "--prompt-template", str(template)]
    server = Served(arguments, tmp_path / "log")
    assert server.process.wait(60) == 2
    assert "flashrec: prompt_template: " in server.log.read_text()
    assert not [each for each in psutil.process_iter(["ppid"]) if each.info["ppid"] == server.process.pid]


def test_signals_to_the_whole_group_drain_as_well(process: tuple[Served, str]) -> None:
    server, url = process
    assert asked(url, n=1).status_code == 200
    for front in fronts_of(server):
        front.send_signal(signal.SIGTERM)
    os.kill(server.process.pid, signal.SIGTERM)
    assert server.process.wait(30) == 0, server.log.read_text()
