"""What a connection may carry beside plain requests: trailers, other protocols, requests in a row, and silence."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import struct
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_support import Running, make_scheduler, running, wait_until
from test_server_attack import GOOD, answer_to, assert_calm, closed_after, head
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from flashrec.server import bodies
from flashrec.server.config import ServerConfig
from flashrec.server.protocol import MAX_HEAD_BYTES, MAX_PIPELINED, _HeadWithBody

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


class Wire(asyncio.Transport):
    """Keeps what is written, one entry for each packet."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []

    def is_closing(self) -> bool:
        return b"end" in self.sent

    def write(self, data: Any) -> None:
        self.sent.append(data)

    def writelines(self, pieces: Any) -> None:
        self.sent.append(b"".join(pieces))

    def close(self) -> None:
        self.sent.append(b"end")


def test_an_answer_s_head_goes_out_with_its_body() -> None:
    for end in ("flush", "close"):
        wire, interim = Wire(), b"HTTP/1.1 100 Continue\r\n\r\n"
        out = _HeadWithBody(wire)
        out.write(interim)
        out.write(b"head,")
        assert wire.sent == [interim]
        out.write(b"body")
        out.write(b"more")
        getattr(out, end)()
        assert wire.sent == [interim, b"head,body", b"more"] + [b"end"] * (end == "close")


@pytest.mark.parametrize("end", ["flush", "close"])
def test_a_head_that_nothing_follows_is_sent(end: str) -> None:
    wire = Wire()
    out = _HeadWithBody(wire)
    out.write(b"head")
    getattr(out, end)()
    assert wire.sent == [b"head"] + [b"end"] * (end == "close")


def test_a_head_is_not_sent_to_who_has_gone() -> None:
    """The loop's transport raises where something is written to it then."""
    wire = Wire()
    out = _HeadWithBody(wire)
    out.write(b"head")
    wire.close()
    out.close()
    assert b"head" not in wire.sent


def test_an_interim_answer_is_sent_at_once(shop: Running) -> None:
    with connect(shop) as client:
        client.sendall(WHOLE.removesuffix(BODY).replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n"))
        assert client.recv(4096) == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert answer_to(client, BODY).startswith(b"HTTP/1.1 200 ")


def test_an_answered_request_leaves_nothing_to_the_collector(shop: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would run on the loop, in the middle of somebody's answer."""
    cycles: list[weakref.ref[object]] = []
    start = HttpToolsProtocol._start_asgi_task

    def starting(self: HttpToolsProtocol, cycle: RequestResponseCycle, app: Any) -> None:
        cycles.append(weakref.ref(cycle))
        start(self, cycle, app)

    monkeypatch.setattr(HttpToolsProtocol, "_start_asgi_task", starting)
    gc.collect()
    gc.disable()
    try:
        with connect(shop) as client:
            for _ in range(4):
                assert answer_to(client, WHOLE).startswith(b"HTTP/1.1 200 ")
        wait_until(lambda: not [cycle for cycle in cycles[:-1] if cycle() is not None])
        assert len(cycles) == 4
    finally:
        gc.enable()


def test_a_body_that_is_here_is_not_timed(shop: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[float] = []
    timeout = asyncio.timeout

    def timing(delay: float) -> asyncio.Timeout:
        timed.append(delay)
        return timeout(delay)

    monkeypatch.setattr(bodies.asyncio, "timeout", timing)  # type: ignore[attr-defined]
    with connect(shop) as client:
        assert answer_to(client, WHOLE).startswith(b"HTTP/1.1 200 ")
        assert not timed
        client.sendall(WHOLE[:-1])
        wait_until(lambda: timed == [1.0])
        assert answer_to(client, WHOLE[-1:]).startswith(b"HTTP/1.1 200 ")


def test_who_asks_for_the_head_alone_gets_it(shop: Running) -> None:
    with connect(shop) as client:
        client.sendall(HEALTH.replace(b"GET", b"HEAD"))
        answer = b""
        while not answer.endswith(b"\r\n\r\n"):
            answer += client.recv(4096)
        assert answer.startswith(b"HTTP/1.1 405 ")
        assert answer_to(client, WHOLE).startswith(b"HTTP/1.1 200 ")


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


@pytest.mark.parametrize("pieces", [1, 2], ids=["at once", "later"])
def test_a_client_that_leaves_behind_requests_in_a_row_is_cancelled(shop: Running, pieces: int) -> None:
    shop.scheduler.hold = True
    with connect(shop) as client:
        client.sendall(WHOLE + HEALTH * (pieces == 1))
        wait_until(lambda: len(shop.scheduler.pending) == 1)
        client.sendall(HEALTH * (pieces == 2))
        time.sleep(0.1)
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
        received = b""
        while received.count(b"HTTP/1.1 200 ") < 2:
            received += (piece := client.recv(1 << 20))
            assert piece, "closed"


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


def test_what_is_no_request_leaves_those_before_it_alone(shop: Running) -> None:
    """A request in a row whose body turns out to be malformed: it is not served, and nobody waits for its end."""
    shop.scheduler.hold = True
    broken = (CHUNKED % b"").partition(b"\r\n\r\n")[0] + b"\r\n\r\nzz\r\n"
    with connect(shop) as client:
        client.sendall(WHOLE + WHOLE + broken)
        wait_until(lambda: len(shop.scheduler.pending) == 1)
        shop.scheduler.hold = False
        shop.scheduler.release()
        received = all_of(client)
    assert received.count(b"HTTP/1.1 200 ") == received.count(b"HTTP/1.1 ") == 2
    assert received.count(b"connection: close") == 1
    assert len(shop.scheduler.submitted) == 2


@pytest.mark.parametrize("encoding", [b"gzip", b"chunked\r\n\r\nzz\r\n"])
def test_a_request_that_is_refused_has_no_effect(shop: Running, encoding: bytes) -> None:
    before = shop.scheduler.flushes
    with connect(shop) as client:
        client.sendall(b"POST /flush_cache HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: %s\r\n\r\n" % encoding)
        received = all_of(client)
    assert received.startswith(b"HTTP/1.1 400 ")
    assert received.count(b"HTTP/1.1 ") == 1
    assert shop.scheduler.flushes == before


def test_a_body_in_many_small_chunks_is_taken(shop: Running) -> None:
    """Size, data and line end each in a segment of its own, more of them than a head may be long."""
    body = json.dumps({**GOOD["/generate"], "rid": "r" * 14_000}).encode()
    with connect(shop) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.sendall((CHUNKED % b"").partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
        for byte in body:
            client.sendall(b"1\r\n")
            client.sendall(bytes([byte]))
            client.sendall(b"\r\n")
        assert answer_to(client, b"0\r\n\r\n").startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("line", [b"GET /health\r\n", b"GET /health HTTP/2.0\r\n", b"GET /health HTTP/0.9\r\n"])
def test_another_version_is_not_spoken(shop: Running, line: bytes) -> None:
    with connect(shop) as client:
        client.sendall(line + b"\r\n")
        received = all_of(client)
    assert received.startswith(b"HTTP/1.1 400 ")
    assert b"malformed_http" in received


def test_nothing_is_left_of_a_connection_that_was_reset(shop: Running) -> None:
    """It would be held, with its headers, for as long as one may be silent."""
    with connect(shop) as client:
        assert answer_to(client, HEALTH).startswith(b"HTTP/1.1 200 ")
        (protocol,) = [one for one in shop.server.server_state.connections if one.client == client.getsockname()]
        wait_until(lambda: protocol.timeout_keep_alive_task is not None)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_until(lambda: protocol not in shop.server.server_state.connections)
    assert protocol.timeout_keep_alive_task is None
    assert protocol._timers == {}


def test_the_last_bytes_of_a_closing_connection_are_not_waited_for(tmp_path: Path) -> None:
    """Fewer than those above which a writer is told to pause, so that nothing tells that they are not read."""
    body = json.dumps({"input_ids": [1], "rid": "r" * (4 << 20)}).encode()
    config = ServerConfig(port=0, body_timeout_s=0.5, max_body_bytes=8 << 20)
    with running(make_scheduler(tmp_path), config) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        client.settimeout(10)
        client.sendall(head("/generate", len(body)).removesuffix(b"\r\n") + b"Connection: close\r\n\r\n" + body)
        wait_until(lambda: len(server.scheduler.submitted) == 1)
        (protocol,) = server.server.server_state.connections - {None}
        wait_until(lambda: protocol.transport.is_closing())
        protocol.loop.call_soon_threadsafe(protocol.resume_writing)  # as where the client reads all but 16 KiB
        wait_until(lambda: len(server.server.server_state.connections) == 0, 5)
