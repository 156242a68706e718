"""What a connection may carry beside plain requests: trailers, other protocols, requests in a row, and silence."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_support import Running, make_scheduler, running, wait_until
from test_server_attack import GOOD, answer_to, assert_calm, closed_after, head

from flashrec.server.config import ServerConfig
from flashrec.server.protocol import MAX_HEAD_BYTES, MAX_PIPELINED

BODY = json.dumps(GOOD["/generate"]).encode()
WHOLE = head("/generate", len(BODY)) + BODY
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHUNKED = (
    b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n%s\r\n" + b"%x\r\n%s\r\n0\r\n" % (len(BODY), BODY)
)
KEEP_ALIVE_S = 1


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Running]:
    config = ServerConfig(port=0, body_timeout_s=1.0, max_body_bytes=1 << 20, max_in_flight=4)
    with running(make_scheduler(tmp_path), config) as server:
        server.server.config.timeout_keep_alive = KEEP_ALIVE_S
        yield server
        assert_calm(server)


def connect(server: Running) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.port))
    client.settimeout(10)
    return client


def all_of(client: socket.socket) -> bytes:
    """What comes until the server closes."""
    received = b""
    while piece := client.recv(65536):
        received += piece
    return received


@pytest.mark.parametrize("pieces", [1, 2], ids=["at once", "later"])
def test_trailers_are_no_headers_of_the_request(tmp_path: Path, pieces: int) -> None:
    """A proxy that checks the headers does not look there."""
    trailer = b"Authorization: Bearer secret\r\nHost: evil\r\n\r\n"
    config = ServerConfig(port=0, api_key="secret")
    with running(make_scheduler(tmp_path), config) as server:
        for given, status in ((b"", b"401"), (b"Authorization: Bearer secret\r\n", b"200")):
            with connect(server) as client:
                start = CHUNKED % given
                parts = [start + trailer] if pieces == 1 else [start, trailer]
                for part in parts:
                    client.sendall(part)
                    time.sleep(0.05)
                assert client.recv(65536).startswith(b"HTTP/1.1 %s " % status)


@pytest.mark.parametrize("drop", [b"a:b\r\n" * 1000, b"a" * 5000], ids=["many", "one"])
@pytest.mark.parametrize("answered", [False, True], ids=["before its answer", "after its answer"])
def test_trailers_may_not_be_endless(shop: Running, drop: bytes, answered: bool) -> None:
    """Sent fast enough for any time limit, whether the application still waits for the end of the body or not."""
    shop.server.config.timeout_keep_alive = 60
    with connect(shop) as client:
        client.sendall((CHUNKED % b"").replace(b"/generate", b"/nowhere" if answered else b"/generate") + b"x: ")
        start = time.monotonic()
        sent = 0
        try:
            while time.monotonic() - start < 0.8:
                client.sendall(drop)
                sent += len(drop)
                time.sleep(0.01)
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert MAX_HEAD_BYTES < sent < 5 * MAX_HEAD_BYTES


@pytest.mark.parametrize("pieces", [1, 2], ids=["one segment", "two segments"])
@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
def test_who_offers_another_protocol_keeps_its_body(shop: Running, protocol: bytes, pieces: int) -> None:
    """As ``curl --http2`` and Java's client do. A body that is a request is still a body."""
    smuggled = b"POST /flush_cache HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
    for body, status in ((BODY, b"200"), (smuggled, b"400")):
        offer = (
            b"Connection: keep-alive, Upgrade, HTTP2-Settings\r\nUpgrade: %s\r\nHTTP2-Settings: AAM\r\n\r\n" % protocol
        )
        start = head("/generate", len(body)).removesuffix(b"\r\n") + offer
        before = shop.scheduler.flushes
        with connect(shop) as client:
            if pieces == 2:
                client.sendall(start)
                time.sleep(0.1)
                start = b""
            assert answer_to(client, start + body).startswith(b"HTTP/1.1 %s " % status)
            assert answer_to(client, WHOLE).startswith(b"HTTP/1.1 200 ")
        assert shop.scheduler.flushes == before


def test_a_tunnel_is_not_opened(shop: Running) -> None:
    for target in (b"example.com:443", b"/generate"):
        with connect(shop) as client:
            client.sendall(b"CONNECT %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % target + WHOLE)
            assert all_of(client).startswith(b"HTTP/1.1 4")
    assert shop.scheduler.submitted == []


def test_a_body_that_ends_after_its_answer_leaves_no_connection_for_ever(shop: Running) -> None:
    with connect(shop) as client:
        early = HEALTH.removesuffix(b"\r\n") + b"Content-Length: 1\r\n\r\n"
        assert answer_to(client, early).startswith(b"HTTP/1.1 200 ")
        client.sendall(b"x")
        assert KEEP_ALIVE_S / 2 < closed_after(client) < 5


def test_a_client_that_leaves_behind_requests_in_a_row_is_cancelled(shop: Running) -> None:
    shop.scheduler.hold = True
    with connect(shop) as client:
        client.sendall(WHOLE + HEALTH)
        wait_until(lambda: len(shop.scheduler.pending) == 1)
    wait_until(lambda: len(shop.scheduler.cancelled) == 1)
    wait_until(lambda: shop.context.lifecycle.places.taken == 0)
    shop.scheduler.hold = False


def test_many_requests_in_a_row_are_not_kept(shop: Running) -> None:
    """Those that fit are answered, the last of them says that no other will be."""
    shop.scheduler.hold = True
    with connect(shop) as client:
        client.sendall(WHOLE + HEALTH * 5000)
        wait_until(lambda: len(shop.scheduler.pending) == 1)
        shop.scheduler.hold = False
        shop.scheduler.release()
        received = all_of(client)
    assert received.count(b"HTTP/1.1 200 ") == 1 + MAX_PIPELINED
    assert received.count(b"connection: close") == 1


def test_only_a_head_counts_as_one(shop: Running) -> None:
    """The end of a long body and the beginning of another request in one read."""
    long = json.dumps({**GOOD["/generate"], "rid": "r" * 200_000}).encode()
    with connect(shop) as client:
        client.sendall(head("/generate", len(long)) + long + HEALTH[:20])
        time.sleep(0.2)
        client.sendall(HEALTH[20:])
        for _ in range(2):
            assert answer_to(client, b"").startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "line", [b"X-A: %s\r\n" % (b"a" * (2 * MAX_HEAD_BYTES)), b"X-A: %s\r\n" % (b"a" * 2000) * 60], ids=["one", "many"]
)
def test_a_head_that_is_too_long_is_told_so_however_it_comes(shop: Running, line: bytes) -> None:
    start = b"POST /generate HTTP/1.1\r\nHost: localhost\r\n" + line + b"\r\n"
    for size in (len(start), 1400):
        with connect(shop) as client:
            try:
                for place in range(0, len(start), size):
                    client.sendall(start[place : place + size])
                answer = client.recv(65536)
            except (BrokenPipeError, ConnectionResetError):
                continue  # closed half way: the answer was there to be read before
            assert answer.startswith(b"HTTP/1.1 431 ")
            assert b"head_too_large" in answer


def test_an_empty_line_behind_a_body_disturbs_neither_its_answer_nor_the_next_request(shop: Running) -> None:
    shop.server.config.timeout_keep_alive = 60
    shop.scheduler.hold = True
    with connect(shop) as client:
        client.sendall(WHOLE)
        wait_until(lambda: len(shop.scheduler.pending) == 1)
        client.sendall(b"\r\n")
        time.sleep(1.5)  # longer than a head may take
        shop.scheduler.hold = False
        shop.scheduler.release()
        assert answer_to(client, b"").startswith(b"HTTP/1.1 200 ")
        client.sendall(b"\r\n")
        time.sleep(0.7)
        client.sendall(HEALTH[:10])
        time.sleep(0.7)  # each within its own second
        assert answer_to(client, HEALTH[10:]).startswith(b"HTTP/1.1 200 ")


def test_what_is_no_request_is_answered_after_what_is(shop: Running) -> None:
    """Not before: a client would take it for the answer that it waits for."""
    shop.scheduler.hold = True
    with connect(shop) as client:
        client.sendall(WHOLE + b"nonsense\r\n\r\n")
        wait_until(lambda: len(shop.scheduler.pending) == 1)
        shop.scheduler.hold = False
        shop.scheduler.release()
        received = all_of(client)
    assert received.startswith(b"HTTP/1.1 200 ")
    assert received.count(b"HTTP/1.1 ") == 1
    with connect(shop) as client:
        client.sendall((CHUNKED % b"").removesuffix(b"0\r\n") + b"zz\r\n")
        assert all_of(client).startswith(b"HTTP/1.1 400 ")
