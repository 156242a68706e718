"""Full queues, deadlines, clients that leave, faults and shutdown."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from server_support import Running, error_of, make_scheduler, running, wait_until

from flashrec.errors import DeadlineError, EngineFault, NonFiniteError, QueueFullError, RequestError
from flashrec.server.config import ServerConfig


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Running]:
    config = ServerConfig(port=0, request_timeout_s=20.0, body_timeout_s=0.3, max_in_flight=2, retry_after_s=3)
    with running(make_scheduler(tmp_path), config) as server:
        yield server


def raw_request(body: bytes) -> bytes:
    head = (
        "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def metric(server: Running, name: str) -> float:
    for line in server.client.get("/metrics").text.splitlines():
        if line.startswith(f"{name} "):
            return float(line.split()[1])
    raise AssertionError(f"no metric {name}")


def test_a_full_queue_is_a_503_with_retry_after(shop: Running) -> None:
    shop.scheduler.refuse = QueueFullError("64 requests wait")
    response = shop.post("/generate", {"text": "x"})
    assert (response.status_code, response.headers["retry-after"]) == (503, "3")
    assert error_of(response)["code"] == "queue_full"
    shop.scheduler.refuse = None
    assert shop.post("/generate", {"text": "x"}).status_code == 200


def test_what_is_left_to_count_is_counted_at_the_end(tmp_path: Path) -> None:
    counted: list[int] = []
    with running(make_scheduler(tmp_path), ServerConfig(port=0)) as server:
        server.context.metrics.later(counted.append, 1)
        server.server.force_exit = True  # a second signal: the application is not told that it ends
    assert counted == [1]


def test_too_many_in_flight_are_refused_before_their_body_is_read(shop: Running) -> None:
    shop.scheduler.hold = True
    with ThreadPoolExecutor(2) as pool:
        held = [pool.submit(shop.post, "/generate", {"text": "x"}) for _ in range(2)]
        wait_until(lambda: len(shop.scheduler.pending) == 2)
        for path in ("/generate", "/generate%0A"):  # a router takes that one, too
            refused = shop.post(path, {"text": "x"})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "3")
        assert shop.client.get("/health").status_code == 200
        shop.scheduler.release()
        assert [future.result().status_code for future in held] == [200, 200]
    assert shop.context.lifecycle.places.taken == 0


def test_a_refusal_passes_no_router_and_is_counted_under_its_path(
    shop: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is what most requests get when there are too many, so it must cost little."""
    counted = 'flashrec_http_requests_total{endpoint="/generate",status="503"}'
    for _ in range(shop.context.config.max_in_flight):
        shop.context.lifecycle.places.take()
    with monkeypatch.context() as patch:
        patch.setattr("flashrec.server.app.answer", lambda *_: pytest.fail("routed"))
        response = shop.post("/generate", {"text": "x"})
    assert (response.status_code, response.headers["retry-after"]) == (503, "3")
    assert metric(shop, counted) == 1
    assert metric(shop, 'flashrec_errors_total{kind="queue_full"}') == 1
    assert shop.post("/flush_cache", {}).status_code == 200
    assert shop.client.get("/generate").status_code == 405
    for _ in range(shop.context.config.max_in_flight):
        shop.context.lifecycle.places.give()
    assert shop.post("/generate", {"text": "x"}).status_code == 200


def test_a_full_queue_is_said_before_anything_is_tokenised(shop: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(shop.scheduler), "queue_depth", property(lambda _: 1024))
    monkeypatch.setattr(shop.context.codec, "encode", lambda *_, **__: pytest.fail("tokenised"))
    response = shop.post("/generate", {"text": "x"})
    assert (response.status_code, error_of(response)["code"]) == (503, "queue_full")
    assert response.headers["retry-after"] == "3"
    assert shop.scheduler.submitted == []


def test_the_scheduler_s_deadline_is_a_504(shop: Running) -> None:
    shop.scheduler.fail = DeadlineError("the deadline passed while the request waited for a wave")
    assert shop.post("/generate", {"text": "x"}).status_code == 504


def test_a_stuck_scheduler_still_gets_a_504_and_a_cancellation(shop: Running) -> None:
    shop.scheduler.hold = True
    start = time.monotonic()
    response = shop.post("/generate", {"text": "x", "timeout": 0.2})
    assert response.status_code == 504
    assert 0.2 <= time.monotonic() - start < 5
    assert shop.scheduler.cancelled == [shop.scheduler.submitted[-1].rid]


def test_the_deadline_counts_from_the_arrival(shop: Running) -> None:
    before = time.monotonic()
    shop.post("/generate", {"text": "x", "timeout": 7.0})
    shop.post("/generate", {"text": "x"})
    after = time.monotonic()
    first, second = shop.scheduler.deadlines
    assert before + 7 <= first <= after + 7
    assert before + 20 <= second <= after + 20


@pytest.mark.parametrize("prompts", [1, 3])
def test_a_client_that_leaves_is_cancelled(shop: Running, prompts: int) -> None:
    shop.scheduler.hold = True
    body = json.dumps({"input_ids": [[1]] * prompts}).encode()
    with socket.create_connection(("127.0.0.1", shop.port)) as client:
        client.sendall(raw_request(body))
        wait_until(lambda: len(shop.scheduler.pending) == prompts)
    wait_until(lambda: len(shop.scheduler.cancelled) == prompts)
    assert sorted(shop.scheduler.cancelled) == sorted(request.rid for request in shop.scheduler.submitted)
    wait_until(lambda: shop.context.lifecycle.places.taken == 0)
    assert metric(shop, "flashrec_cancelled_requests_total") == 1


def test_a_late_failure_of_an_abandoned_request_is_silent(shop: Running) -> None:
    """Warnings are errors here: an exception that nobody retrieves would fail this test."""
    late: list[str] = []

    def fail_late(rid: str) -> None:
        shop.scheduler.pending.pop(rid).set_exception(NonFiniteError("too late"))
        late.append(rid)

    shop.scheduler.cancel = fail_late
    shop.scheduler.hold = True
    assert shop.post("/generate", {"text": "x", "timeout": 0.05}).status_code == 504
    assert late == [shop.scheduler.submitted[-1].rid]
    assert shop.client.get("/health").status_code == 200


def test_the_first_of_a_list_to_fail_answers_for_all(shop: Running) -> None:
    """Long before the deadline, and the others are cancelled."""
    shop.scheduler.hold = True

    def fail_second() -> None:
        wait_until(lambda: len(shop.scheduler.pending) == 3)
        second = shop.scheduler.submitted[1].rid
        shop.scheduler.pending[second].set_exception(NonFiniteError("the second"))

    failing = threading.Thread(target=fail_second)
    failing.start()
    start = time.monotonic()
    response = shop.post("/generate", {"input_ids": [[1], [2], [3]], "timeout": 15.0})
    failing.join()
    assert response.status_code == 500
    assert "the second" in error_of(response)["message"]
    assert time.monotonic() - start < 5
    first, second, third = (request.rid for request in shop.scheduler.submitted)
    assert sorted(shop.scheduler.cancelled) == sorted([first, third])
    assert second not in shop.scheduler.cancelled


def test_client_ids_never_reach_the_scheduler(shop: Running) -> None:
    """Two clients that choose one rid must not cancel each other."""
    for _ in range(2):
        assert shop.post("/generate", {"text": "x", "rid": "same"}).json()["meta_info"]["id"] == "same"
    first, second = (request.rid for request in shop.scheduler.submitted)
    assert first != second
    assert "same" not in first + second


def test_one_bad_prompt_of_a_list_queues_none(shop: Running) -> None:
    response = shop.post("/generate", {"input_ids": [[1], [2], [999]]})
    assert error_of(response)["param"] == "input_ids[2]"
    assert shop.scheduler.submitted == []


def test_a_client_that_goes_while_its_list_is_queued_leaves_nothing_behind(shop: Running) -> None:
    real, queueing = shop.scheduler.submit_all, threading.Event()

    def submit_all(requests: object, deadline: float | None = None) -> object:
        queueing.set()
        time.sleep(0.3)
        return real(requests, deadline)

    shop.scheduler.submit_all = submit_all
    shop.scheduler.hold = True
    with socket.create_connection(("127.0.0.1", shop.port)) as client:
        client.sendall(raw_request(b'{"input_ids": [[1], [2], [3]]}'))
        assert queueing.wait(5)
    wait_until(lambda: len(shop.scheduler.cancelled) == 3)
    assert shop.scheduler.pending == {}


@pytest.mark.parametrize(
    ("error", "status", "code", "kind"),
    [
        (RequestError("n", "cannot"), 400, "invalid_value", "invalid_request_error"),
        (NonFiniteError("scores are not finite"), 500, "non_finite", "model_output_error"),
        (ValueError("surprise"), 500, "internal_error", "server_error"),
    ],
)
def test_a_poisoned_request_fails_alone(shop: Running, error: Exception, status: int, code: str, kind: str) -> None:
    shop.scheduler.fail = error
    response = shop.post("/generate", {"text": "x"})
    assert (response.status_code, error_of(response)["code"], error_of(response)["type"]) == (status, code, kind)
    assert response.headers["x-request-id"]
    assert "surprise" not in response.text
    shop.scheduler.fail = None
    assert shop.post("/generate", {"text": "x"}).status_code == 200
    assert shop.client.get("/health").status_code == 200


def test_an_engine_fault_answers_every_waiter_and_ends_the_server(shop: Running) -> None:
    shop.scheduler.hold = True
    with ThreadPoolExecutor(2) as pool:
        url = f"http://127.0.0.1:{shop.port}/generate"
        waiting = [pool.submit(httpx.post, url, json={"text": "x"}) for _ in range(2)]
        wait_until(lambda: len(shop.scheduler.pending) == 2)
        for future in shop.scheduler.pending.values():
            future.set_exception(EngineFault("the engine failed: device lost"))
        answers = [future.result() for future in waiting]
    assert [answer.status_code for answer in answers] == [500, 500]
    assert {error_of(answer)["code"] for answer in answers} == {"engine_fault"}
    assert isinstance(shop.context.lifecycle.fault, EngineFault)
    wait_until(lambda: shop.scheduler.closed)
    with pytest.raises(httpx.TransportError):
        shop.client.get("/health")


def test_shutdown_answers_what_runs_first(tmp_path: Path) -> None:
    scheduler = make_scheduler(tmp_path)
    with running(scheduler, ServerConfig(port=0, drain_timeout_s=10)) as server, ThreadPoolExecutor(1) as pool:
        scheduler.hold = True
        answer = pool.submit(server.post, "/generate", {"text": "x"})
        wait_until(lambda: len(scheduler.pending) == 1)
        server.server.handle_exit(15, None)
        time.sleep(0.3)
        assert not scheduler.closed
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{server.port}/health")
        scheduler.release()
        assert answer.result().status_code == 200
        wait_until(lambda: scheduler.closed)
        assert server.context.lifecycle.fault is None


def test_a_drain_that_takes_too_long_is_cut(tmp_path: Path) -> None:
    scheduler = make_scheduler(tmp_path)
    scheduler.hold = True
    with running(scheduler, ServerConfig(port=0, drain_timeout_s=1)) as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, "/generate", {"text": "x"})
        wait_until(lambda: len(scheduler.pending) == 1)
        server.server.handle_exit(15, None)
        wait_until(lambda: scheduler.closed, 10)
        assert (answer.result().status_code, error_of(answer.result())["code"]) == (503, "shutting_down")
    assert len(scheduler.cancelled) == 1


def test_a_slow_body_is_a_408(shop: Running) -> None:
    with socket.create_connection(("127.0.0.1", shop.port)) as client:
        client.sendall(raw_request(b'{"text": "x"}')[:-5])
        client.settimeout(10)
        assert client.recv(4096).startswith(b"HTTP/1.1 408 ")
    wait_until(lambda: shop.context.lifecycle.places.taken == 0)


def test_a_slow_client_does_not_hold_up_others(shop: Running) -> None:
    stop = threading.Event()

    def dribble() -> None:
        with socket.create_connection(("127.0.0.1", shop.port)) as client:
            for byte in raw_request(b'{"text": "x"}')[:40]:
                if stop.wait(0.01):
                    return
                client.sendall(bytes([byte]))

    thread = threading.Thread(target=dribble)
    thread.start()
    try:
        assert shop.post("/generate", {"text": "x"}).status_code == 200
    finally:
        stop.set()
        thread.join()
