"""The harness's client against a server of a few bytes: answers in pieces, ends, silence."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from flashrec.errors import ConfigError
from flashrec_harness import http_client
from flashrec_harness.http_client import Client, HangError

Talk = Callable[[socket.socket], None]


@contextmanager
def server(*talks: Talk) -> Iterator[str]:
    """Speaks to one connection after the other as it is told."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            for talk in talks:
                connection, _ = listener.accept()
                with connection:
                    talk(connection)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(5)
        assert not thread.is_alive()


def reading(connection: socket.socket) -> tuple[bytes, bytes]:
    """One request: its head and its body."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += _some(connection)
    head, _, body = data.partition(b"\r\n\r\n")
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    while lengths and len(body) < int(lengths[0].split(b":")[1]):
        body += _some(connection)
    return head, body


def _some(connection: socket.socket) -> bytes:
    data = connection.recv(4096)
    assert data, "the client has gone"
    return data


def test_two_requests_share_a_connection_and_bodies_come_in_pieces() -> None:
    seen = []

    def talk(connection: socket.socket) -> None:
        seen.append(reading(connection))
        for piece in (b"HTTP/1.1 200 OK\r\ncontent-", b"length: 11\r\n\r", b"\nhello", b" world"):
            connection.sendall(piece)
        seen.append(reading(connection))
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n")
        connection.sendall(b"HTTP/1.1 503 Busy\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n")

    with server(talk) as url, Client(url) as client:
        assert client.post("/generate", b'{"a": 1}') == http_client.Reply(200, b"hello world")
        assert client.get("/health") == http_client.Reply(503, b"")
    (head, body), (second, nothing) = seen
    assert head.split(b"\r\n")[0] == b"POST /generate HTTP/1.1"
    assert f"Host: {url.removeprefix('http://')}".encode() in head
    assert body == b'{"a": 1}'
    assert second.startswith(b"GET /health")
    assert nothing == b""


def test_a_server_that_closes_after_its_answer_gets_a_new_connection() -> None:
    def talk(connection: socket.socket) -> None:
        reading(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok")

    with server(talk, talk) as url, Client(url) as client:
        assert [client.get("/").content for _ in range(2)] == [b"ok", b"ok"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", "before its answer was whole"),
        (b"HTTP/1.1 200", "before its answer was whole"),
        (b"SSH-2.0-x\r\n\r\n", "no HTTP/1.1 answer: b'SSH-2.0-x'"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n", "no Content-Length"),
    ],
)
def test_what_is_no_whole_answer_is_an_error_and_the_next_request_starts_anew(answer: bytes, message: str) -> None:
    def broken(connection: socket.socket) -> None:
        reading(connection)
        connection.sendall(answer)

    def well(connection: socket.socket) -> None:
        reading(connection)
        connection.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")

    with server(broken, well) as url, Client(url) as client:
        with pytest.raises(ConnectionError, match=message):
            client.post("/generate", b"{}")
        assert client.get("/health").status == 204


def test_silence_is_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "TIMEOUT_S", 0.05)
    done = threading.Event()

    def talk(connection: socket.socket) -> None:
        reading(connection)
        done.wait(5)

    with server(talk) as url, Client(url) as client:
        with pytest.raises(HangError, match=r"POST /generate: no answer in 0\.05 s"):
            client.post("/generate", b"{}")
        done.set()


@pytest.mark.parametrize("url", ["https://127.0.0.1:1", "http://127.0.0.1:1/prefix", "127.0.0.1:8000"])
def test_what_it_cannot_speak_to_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="http://HOST:PORT only"):
        Client(url)


def test_a_connection_that_the_server_has_closed_meanwhile_is_not_used_again() -> None:
    """Some servers wait five seconds for the next request, and a load's next round may come later."""

    def once(connection: socket.socket) -> None:
        reading(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    with server(once, once) as url, Client(url) as client:
        assert client.post("/", b"{}").status == 200
        time.sleep(0.2)  # the server has closed its end
        assert client.post("/", b"{}").status == 200


def test_a_server_that_takes_no_connection_is_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(*_: object, **__: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", hangs)
    with pytest.raises(HangError, match="POST /generate: no answer in 120 s"):
        Client("http://127.0.0.1:9").post("/generate", b"{}")


def test_an_awake_client_reads_the_same_and_computes_while_it_waits() -> None:
    """An answer in two pieces, half a second apart."""

    def talk(connection: socket.socket) -> None:
        reading(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhello")
        time.sleep(0.5)
        connection.sendall(b"world")

    spent = {}
    for awake in (False, True):
        with server(talk) as url, Client(url) as client:
            before = time.thread_time()
            assert client.post("/x", b"{}", awake=awake).content == b"helloworld"
            spent[awake] = time.thread_time() - before
    assert spent[False] < 0.02 < 0.04 < spent[True]


def test_an_awake_client_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "TIMEOUT_S", 0.1)
    over = threading.Event()

    def silent(connection: socket.socket) -> None:
        reading(connection)
        over.wait(5)

    with server(silent) as url, Client(url) as client:
        with pytest.raises(HangError, match="no answer in"):
            client.post("/x", b"{}", awake=True)
        over.set()
