"""Client processes: what each sends, that none outlives its owner, and the rate that they measure."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from flashrec_harness.http_client import Reply
from flashrec_harness.load import poisson_arrivals
from flashrec_harness.outcome import Outcome
from flashrec_harness.overload import fleet, suite
from flashrec_harness.overload.fleet import Shot, steady_rate


def test_the_steady_rate_leaves_out_filling_up_and_running_dry() -> None:
    """50 answers at 10/s, after 5 s of nothing but one, and before 7 s of nothing but one; refusals do not count."""
    ends = [0.0, *(5 + index / 10 for index in range(50)), 17.0]
    shots = [Shot(200, 0.1, end) for end in ends] + [Shot(503, 0.001, index / 100) for index in range(1700)]
    random.Random(0).shuffle(shots)
    assert steady_rate(shots) == pytest.approx(10.0)
    assert steady_rate([]) == 0.0


def test_the_steady_rate_of_waves_does_not_depend_on_where_the_cut_falls() -> None:
    """30 answers every 0.35 s are 85.7 a second, wherever the middle begins; from cut to cut it is up to 8 % off."""
    worst, worst_from_cut_to_cut = 0.0, 0.0
    for lost in range(0, 60, 4):
        ends = [0.35 * (index // 30) for index in range(lost, 450)]
        found = steady_rate([Shot(200, 0.1, end) for end in ends])
        worst = max(worst, abs(found / (30 / 0.35) - 1))
        cut = ends[len(ends) // 5 : len(ends) - len(ends) // 5]
        worst_from_cut_to_cut = max(worst_from_cut_to_cut, abs((len(cut) - 1) / (cut[-1] - cut[0]) / (30 / 0.35) - 1))
    assert worst < 0.02
    assert worst_from_cut_to_cut > 0.05


def test_the_cores_of_a_load_are_those_that_its_clients_kept_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten requests of 10 ms each, which a client waits for or computes through."""

    class Waiting:
        def __init__(self, url: str) -> None:
            self.url = url

        def __enter__(self) -> Waiting:
            return self

        def __exit__(self, *_: object) -> None: ...

        def post(self, path: str, body: bytes, *, awake: bool = False) -> Reply:
            time.sleep(0.01)
            return Reply(200, b"")

    class Computing(Waiting):
        def post(self, path: str, body: bytes, *, awake: bool = False) -> Reply:
            until = time.thread_time() + 0.01
            while time.thread_time() < until:
                pass
            return Reply(200, b"")

    found = {}
    for kind in (Waiting, Computing):
        monkeypatch.setattr(fleet, "Client", kind)
        load = fleet.Fleet("http://nowhere", [b""], 1).load(10, 1)
        assert [shot.status for shot in load.shots] == [200] * 10
        found[kind] = load.cores
    assert found[Waiting] < found[Computing] / 3
    assert found[Computing] <= 1.1


def _sent(plans: list[fleet.Plan]) -> list[bytes]:
    return [one.payloads[(one.first + index) % len(one.payloads)] for one in plans for index in range(one.requests)]


def test_no_payload_comes_twice_before_all_have_been_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the server would answer it from its prefix cache: 24 payloads, of 4 processes and over two loads."""
    monkeypatch.setattr(fleet, "ProcessPoolExecutor", mock.MagicMock())
    payloads = [b"%d" % number for number in range(24)]
    load = fleet.Fleet("http://nowhere", payloads, 4)
    first, second = _sent(load.plans(8, 4)), _sent(load.plans(16, 4, rate=5.0))
    assert sorted(first + second) == sorted(payloads)
    assert sorted(_sent(load.plans(8, 4))) == sorted(first)
    dues = [one.dues for one in load.plans(16, 4, rate=5.0, seed=3)]
    assert [due for turn in zip(*dues, strict=True) for due in turn] == poisson_arrivals(16, 5.0, 3), "one stream"
    few = fleet.Fleet("http://nowhere", payloads[:3], 4)
    assert set(_sent(few.plans(4, 4))) == set(payloads[:3])


def test_every_process_carries_out_its_own_plan_from_the_same_moment_on() -> None:
    """Against nothing that listens: no shot comes back, and each process has taken the time of its own arrivals."""
    load = fleet.Fleet("http://127.0.0.1:9", [b"0", b"1", b"2"], 3)
    try:
        assert len(load._pools) == 3
        pids = {pool.submit(os.getpid).result() for pool in load._pools}
        assert len(pids) == 3
        start = time.time()
        assert load.load(6, 3, rate=20.0, seed=1).shots == []
        assert time.time() - start >= poisson_arrivals(6, 20.0, 1)[-1]
    finally:
        load.close()


class InThisProcess:
    """A pool of one that runs what it is given at once."""

    def __init__(self, _: int, *, mp_context: object, initializer: object) -> None: ...

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        done = Future[Any]()
        done.set_result(function(*arguments))
        return done


class Echo:
    """A client that answers itself."""

    def __init__(self, _: str) -> None: ...

    def __enter__(self) -> Echo:
        return self

    def __exit__(self, *_: object) -> None: ...

    def post(self, path: str, body: bytes, *, awake: bool = False) -> Reply:
        return Reply(200, b"answer " + body)


def test_client_processes_end_with_whoever_started_them(tmp_path: Path) -> None:
    """Killed, as a measuring process is whose time is over."""
    code = (
        "import os, time\n"
        "from flashrec_harness.overload.fleet import Fleet\n"
        "if __name__ == '__main__':\n"
        "    fleet = Fleet('http://127.0.0.1:9', [b'0', b'1'], 2)\n"
        "    print(*[pool.submit(os.getpid).result() for pool in fleet._pools], flush=True)\n"
        "    time.sleep(60)\n"
    )
    script = tmp_path / "owner.py"
    script.write_text(code)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        clients = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
        owner.kill()
    assert len(clients) == 2
    assert psutil.wait_procs(clients, timeout=10)[1] == []


@contextmanager
def listening() -> Iterator[tuple[str, set[object]]]:
    """A server that answers ``{}``, and the clients' ends of its connections."""
    connections: set[object] = set()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            connections.add(self.client_address)
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", connections
        server.shutdown()


def test_connections_stay_open_from_load_to_load() -> None:
    """Or the first answers of every timed round would open them."""
    with listening() as (url, connections):
        load = fleet.Fleet(url, [b"{}"], 1)
        for _ in range(3):
            assert [shot.status for shot in load.load(12, 3).shots] == [200] * 12
        assert len(connections) <= 3
        load.close()


def test_a_process_sends_on_from_where_its_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[bytes] = []

    class Noting:
        def __init__(self, url: str) -> None: ...

        def __enter__(self) -> Noting:
            return self

        def __exit__(self, *_: object) -> None: ...

        def post(self, path: str, body: bytes, *, awake: bool = False) -> Reply:
            bodies.append(body)
            return Reply(200, b"answer " + body)

    monkeypatch.setattr(fleet, "Client", Noting)
    load = fleet.Fleet("http://nowhere", [b"0", b"1", b"2"], 1)
    load.load(2, 1)
    assert load.load(2, 1).contents == {}
    assert bodies == [b"0", b"1", b"2", b"0"]
    load.rewind()
    assert load.load(2, 1, keep=True).contents == {0: b"answer 0", 1: b"answer 1"}


@pytest.mark.parametrize(("requests", "concurrency", "clients"), [(64, 8, 3), (256, 32, 6), (64, 13, 8), (5, 32, 4)])
def test_each_client_of_a_closed_loop_has_as_much_to_send(
    monkeypatch: pytest.MonkeyPatch, requests: int, concurrency: int, clients: int
) -> None:
    monkeypatch.setattr(fleet, "ProcessPoolExecutor", mock.MagicMock())
    plans = fleet.Fleet("http://nowhere", [b""] * requests, clients).plans(requests, concurrency)
    assert sum(plan.requests for plan in plans) == requests
    assert sum(plan.concurrency for plan in plans) == concurrency
    for plan in plans:
        assert abs(plan.requests - requests * plan.concurrency / concurrency) < 1


def test_requests_without_an_answer_fail() -> None:
    fine = [Shot(200, 0.1, 1.0), Shot(503, 0.1, 1.0)]
    assert suite._nothing_else(fine, [], 200).outcome is Outcome.PASS
    for shots, lost, health, reason in (
        (fine, ["HangError: silence"], 200, "1 requests without an answer, the first: HangError: silence"),
        ([*fine, Shot(500, 0.1, 1.0)], [], 200, "other statuses {500: 1}"),
        (fine, [], 503, "/health answers 503"),
    ):
        check = suite._nothing_else(shots, lost, health)
        assert (check.outcome, check.reason) == (Outcome.FAIL, reason)


def test_answers_of_several_processes_are_numbered_as_their_payloads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "ProcessPoolExecutor", InThisProcess)
    monkeypatch.setattr(fleet, "Client", Echo)
    monkeypatch.setattr(fleet, "_client", Echo)
    load = fleet.Fleet("http://nowhere", [b"%d" % number for number in range(5)], 2)
    found = load.load(6, 2, keep=True)
    assert found.contents == {number: b"answer %d" % number for number in range(5)}
    assert [shot.status for shot in found.shots] == [200] * 6


@pytest.mark.parametrize(
    ("concurrency", "rate", "cores", "awake"),
    [(1, None, True, True), (1, None, False, False), (2, None, True, False), (1, 100.0, True, False)],
)
def test_a_lone_client_stays_awake_where_there_are_cores_for_it(
    concurrency: int, rate: float | None, cores: bool, awake: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[fleet.Plan] = []

    def fire(plan: fleet.Plan, _: object) -> fleet.Fired:
        plans.append(plan)
        return fleet.Fired([Shot(200, 0.1, 1.0)])

    monkeypatch.setattr(fleet, "fire", fire)
    monkeypatch.setattr(fleet, "may_poll", lambda: cores)
    fleet.Fleet("http://nowhere", [b""], 1).load(10, concurrency, rate)
    assert [plan.awake for plan in plans] == [awake]
