"""Hostile input over real sockets: every answer is a 200 or a 4xx, and the server keeps answering."""

from __future__ import annotations

import json
import random
import re
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_support import Running, error_of, make_scheduler, running, wait_until

from flashrec.server.config import ServerConfig
from flashrec.server.openai import ChatCompletionRequest, CompletionRequest
from flashrec.server.profiling import StartProfileRequest
from flashrec.server.protocol import MAX_HEAD_BYTES
from flashrec.server.recommend import RecommendRequest
from flashrec.server.schemas import Body
from flashrec.server.sglang import GenerateRequest, SamplingParams

BODIES: dict[str, type[Body]] = {
    "/generate": GenerateRequest,
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/recommend": RecommendRequest,
}
GOOD: dict[str, dict[str, Any]] = {
    "/generate": {"input_ids": [1, 2], "sampling_params": {"n": 2}},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"prompt": "x"},
    "/v1/recommend": {"history": ["kiwi"]},
}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp("shop")
    config = ServerConfig(port=0, profiler_dir=directory / "profiles", body_timeout_s=2.0, max_body_bytes=1 << 20)
    with running(make_scheduler(directory), config) as server:
        yield server
        assert_calm(server)


def assert_calm(server: Running) -> None:
    """Nothing held, nothing queued, and both a probe and a real request are answered."""
    wait_until(lambda: server.context.lifecycle.places.taken == 0)
    assert server.scheduler.pending == {}
    assert server.client.get("/health").status_code == 200
    assert server.post("/generate", GOOD["/generate"]).status_code == 200


def leaves() -> st.SearchStrategy[Any]:
    numbers = st.integers() | st.integers(-3, 300) | st.floats(allow_nan=True, allow_infinity=True)
    texts = st.text(max_size=8) | st.sampled_from(["plum", "<s_a_0><s_b_0>", "vocab", "user", "CPU", "../x", "1" * 30])
    return st.none() | st.booleans() | numbers | texts


def values() -> st.SearchStrategy[Any]:
    keys = st.text(max_size=6) | st.sampled_from(["role", "content", "text", "type", *SamplingParams.model_fields])
    return st.recursive(
        leaves(), lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4), max_leaves=8
    )


@settings(max_examples=150, deadline=None)
@pytest.mark.parametrize("path", BODIES)
@given(data=st.data())
def test_wrong_types_in_every_field(shop: Running, path: str, data: st.DataObject) -> None:
    names = st.sampled_from(sorted(BODIES[path].model_fields))
    changes = data.draw(st.dictionaries(names | st.text(max_size=5), values(), max_size=3))
    base = data.draw(st.sampled_from([{}, GOOD[path]]))
    response = shop.raw(path, json.dumps(base | changes).encode("utf-8", "surrogatepass"))
    assert response.status_code in {200, 400, 404}, response.text
    if response.status_code != 200:
        error = error_of(response)
        assert error["param"]
        assert "\n" not in error["message"].splitlines()[0]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_wrong_types_in_the_profile_request(shop: Running, data: st.DataObject) -> None:
    """Always with one field that is refused, so that nothing is recorded."""
    names = st.sampled_from(sorted(StartProfileRequest.model_fields))
    changes = data.draw(st.dictionaries(names, values(), max_size=3))
    response = shop.raw("/start_profile", json.dumps(changes | {"merge_profiles": True}).encode())
    assert response.status_code == 400, response.text
    assert shop.scheduler.engine.profiler.state == "idle"


@settings(max_examples=150, deadline=None)
@given(cut=st.integers(0, 200), noise=st.binary(max_size=6), path=st.sampled_from(sorted(BODIES)))
def test_damaged_json(shop: Running, cut: int, noise: bytes, path: str) -> None:
    body = json.dumps(GOOD[path]).encode()
    cut = min(cut, len(body))
    response = shop.raw(path, body[:cut] + noise + body[cut + 1 :])
    assert response.status_code in {200, 400}, response.text


@pytest.mark.parametrize("path", BODIES)
def test_ten_megabytes(shop: Running, path: str) -> None:
    with socket.create_connection(("127.0.0.1", shop.port)) as client:
        client.settimeout(10)
        client.sendall(head(path, 10 << 20))
        assert client.recv(4096).startswith(b"HTTP/1.1 413 ")
    assert_calm(shop)


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 500_000,
        b'{"a":' * 100_000,
        b'{"text": "' + b"\\u0041" * 100_000 + b'"}',
        b'{"input_ids": [' + b"1," * 400_000 + b"1]}",
        b'{"input_ids": ' + b"[" * 900 + b"1" + b"]" * 900 + b"}",
        b'{"' + b"k" * 500_000 + b'": 1}',
        b'{"text": ' + b"9" * 500_000 + b"}",
        b"\0" * 1000,
        b"\xef\xbb\xbf{}",
        b"\xff\xfe{\0}\0",
    ],
    ids=["nesting", "objects", "escapes", "long prompt", "deep ids", "long key", "long number", "nul", "bom", "utf16"],
)
def test_expensive_bodies(shop: Running, body: bytes) -> None:
    response = shop.raw("/generate", body)
    assert response.status_code == 400
    assert len(response.content) < 1000
    assert_calm(shop)


def head(path: str, length: int) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {length}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def test_half_closed_and_reset_sockets(shop: Running) -> None:
    """Connections cut at every stage: inside the head, inside the body, and before the answer is read."""
    body = json.dumps(GOOD["/generate"]).encode()
    whole = head("/generate", len(body)) + body
    for seed in range(60):
        choice = random.Random(seed)
        with socket.create_connection(("127.0.0.1", shop.port)) as client:
            client.sendall(whole[: choice.randrange(len(whole) + 1)])
            ending = choice.randrange(3)
            if ending == 0:
                client.shutdown(socket.SHUT_WR)
                client.settimeout(5)
                client.recv(4096)
            elif ending == 1:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert_calm(shop)


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"POST /generate HTTP/9.9\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        bytes(range(256)) * 20,
    ],
)
def test_bytes_that_are_not_http(shop: Running, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", shop.port)) as client:
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        client.settimeout(5)
        answer = client.recv(4096)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
    assert_calm(shop)


def test_many_idle_connections_do_not_keep_others_out(shop: Running) -> None:
    idle = [socket.create_connection(("127.0.0.1", shop.port)) for _ in range(100)]
    try:
        assert_calm(shop)
    finally:
        for client in idle:
            client.close()


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
def test_ten_megabytes_that_are_really_sent(shop: Running, path: str, chunked: bool) -> None:
    """The answer comes while the body is still on its way; what is left of it is not read."""
    block = b"a" * 65536
    framing = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % (10 << 20)
    start = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n%s\r\n\r\n" % (
        path.encode(),
        framing,
    )
    with socket.create_connection(("127.0.0.1", shop.port)) as client:
        client.settimeout(10)
        try:
            client.sendall(start)
            for _ in range(160):
                client.sendall(b"%x\r\n%s\r\n" % (len(block), block) if chunked else block)
            client.sendall(b"0\r\n\r\n" if chunked else b"")
        except (ConnectionResetError, BrokenPipeError):
            return  # closed half way: the answer was there to be read before
        assert client.recv(4096).startswith(b"HTTP/1.1 413 ")
    assert_calm(shop)


def closed_after(client: socket.socket, patience_s: float = 10.0) -> float:
    """Seconds until the server closes the connection."""
    client.settimeout(patience_s)
    start = time.monotonic()
    try:
        while client.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return time.monotonic() - start


def closed_under(client: socket.socket, drop: bytes, patience_s: float = 10.0) -> float:
    """Seconds until the server closes a connection that sends a drop every 50 ms."""
    start = time.monotonic()
    while time.monotonic() - start < patience_s:
        try:
            client.sendall(drop)
        except (BrokenPipeError, ConnectionResetError):
            break
        time.sleep(0.05)
    return time.monotonic() - start


@pytest.mark.parametrize("sent", [b"", b"P", b"POST /generate HTTP/1.1\r\nHost: localhost\r\nX-A: "])
def test_a_head_that_never_ends_is_not_waited_for(shop: Running, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", shop.port)) as client:
        client.sendall(sent)
        assert closed_after(client) < 5


def test_a_byte_now_and_then_does_not_keep_a_connection(shop: Running) -> None:
    """Slow loris: a hundred of them, each sending a header byte every 50 ms, while others are served."""
    clients = [socket.create_connection(("127.0.0.1", shop.port)) for _ in range(100)]
    try:
        for client in clients:
            client.sendall(b"POST /generate HTTP/1.1\r\nX-A: ")
        end = time.monotonic() + 8
        open_ones = list(clients)
        while open_ones and time.monotonic() < end:
            assert shop.client.get("/health").status_code == 200
            time.sleep(0.05)
            for client in list(open_ones):
                try:
                    client.sendall(b"a")
                except (BrokenPipeError, ConnectionResetError):
                    open_ones.remove(client)
        assert open_ones == []
    finally:
        for client in clients:
            client.close()
    assert_calm(shop)


def test_a_second_request_s_head_is_not_waited_for_either(shop: Running) -> None:
    body = json.dumps(GOOD["/generate"]).encode()
    with socket.create_connection(("127.0.0.1", shop.port)) as client:
        client.settimeout(10)
        client.sendall(head("/generate", len(body)) + body)
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
        client.sendall(b"POST /gen")
        assert closed_after(client) < 5


def answer_to(client: socket.socket, request: bytes) -> bytes:
    """The whole of the answer to a request, whose body may come after its head."""
    client.sendall(request)
    received = b""
    while b"\r\n\r\n" not in received:
        received += client.recv(65536)
    start, _, body = received.partition(b"\r\n\r\n")
    (length,) = re.findall(rb"(?i)content-length: (\d+)", start)
    while len(body) < int(length):
        body += client.recv(65536)
    return start


def test_empty_lines_now_and_then_do_not_keep_a_connection(shop: Running) -> None:
    """A parser skips them before a request without a word."""
    body = json.dumps(GOOD["/generate"]).encode()
    with socket.create_connection(("127.0.0.1", shop.port)) as client:
        client.settimeout(10)
        client.sendall(head("/generate", len(body)) + body)
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
        assert closed_under(client, b"\r\n") < 5


def test_a_head_may_not_be_endless(shop: Running) -> None:
    """Fast enough for any time limit, and a piece at a time, as a network delivers it."""
    with socket.create_connection(("127.0.0.1", shop.port)) as client:
        client.sendall(b"POST /generate HTTP/1.1\r\n")
        # Within the two seconds that a head may take it sends twice what a head may have.
        assert closed_under(client, b"X-A: " + b"a" * (MAX_HEAD_BYTES // 8) + b"\r\n") < 1.5
    assert_calm(shop)


def test_a_long_head_in_pieces_is_taken(shop: Running) -> None:
    body = json.dumps(GOOD["/generate"]).encode()
    start = head("/generate", len(body)).removesuffix(b"\r\n") + b"X-A: %s\r\n" % (b"a" * 20_000) + b"\r\n"
    with socket.create_connection(("127.0.0.1", shop.port)) as client:
        client.settimeout(10)
        for place in range(0, len(start), 1000):
            client.sendall(start[place : place + 1000])
            time.sleep(0.002)
        client.sendall(body)
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_the_rest_of_a_body_that_was_refused_is_not_waited_for(shop: Running) -> None:
    with socket.create_connection(("127.0.0.1", shop.port)) as client:
        client.settimeout(10)
        client.sendall(head("/generate", 10 << 20))
        assert client.recv(65536).startswith(b"HTTP/1.1 413 ")
        assert closed_under(client, b"a") < 5


def test_a_connection_stays_open_between_requests(shop: Running) -> None:
    """Longer than the time limit of a head; the first one is refused before its body has been sent."""
    body = json.dumps(GOOD["/generate"]).encode()
    with socket.create_connection(("127.0.0.1", shop.port)) as client:
        client.settimeout(10)
        assert answer_to(client, head("/generate", 2 << 20)).startswith(b"HTTP/1.1 413 ")
        client.sendall(b" " * (2 << 20))
        for _ in range(2):
            time.sleep(2.5)
            assert answer_to(client, head("/generate", len(body)) + body).startswith(b"HTTP/1.1 200 ")


def test_who_asks_for_another_protocol_is_answered_in_this_one(shop: Running) -> None:
    asked = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    with socket.create_connection(("127.0.0.1", shop.port)) as client:
        client.settimeout(10)
        client.sendall(asked)
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
    assert_calm(shop)


def test_requests_in_a_row_are_answered_in_a_row(shop: Running) -> None:
    body = json.dumps(GOOD["/generate"]).encode()
    with socket.create_connection(("127.0.0.1", shop.port)) as client:
        client.settimeout(10)
        client.sendall((head("/generate", len(body)) + body) * 5)
        received = b""
        while received.count(b"HTTP/1.1 200 ") < 5:
            received += client.recv(65536)


def test_an_answer_that_nobody_reads_is_let_go(tmp_path: Path) -> None:
    """Its id is echoed twice, 14 MB: more than the sockets' buffers hold."""
    body = json.dumps({"input_ids": [1], "rid": "r" * (7 << 20)}).encode()
    config = ServerConfig(port=0, body_timeout_s=0.5, max_body_bytes=8 << 20)
    with running(make_scheduler(tmp_path), config) as server:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", server.port))
            client.sendall(head("/generate", len(body)) + body)
            wait_until(lambda: len(server.scheduler.submitted) == 1)
            wait_until(lambda: len(server.server.server_state.connections) == 0)
            assert closed_after(client) < 5
        assert_calm(server)


def test_resets_in_the_middle_of_an_answer(shop: Running) -> None:
    body = json.dumps({"input_ids": [[1]] * 200, "sampling_params": {"n": 4}}).encode()
    for seed in range(20):
        with socket.create_connection(("127.0.0.1", shop.port)) as client:
            client.settimeout(10)
            client.sendall(head("/generate", len(body)) + body)
            assert client.recv(1 + 100 * (seed % 5))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert_calm(shop)


def test_the_attack_would_notice_a_held_request(shop: Running) -> None:
    """Negative control: a request that is still in the queue is not calm."""
    shop.scheduler.pending["planted"] = None
    try:
        with pytest.raises(AssertionError):
            assert_calm(shop)
    finally:
        del shop.scheduler.pending["planted"]
