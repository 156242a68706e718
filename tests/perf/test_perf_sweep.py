"""The sweep of arrival rates: where the knee is, and what the report says of it."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from simulated_engine import workload

from flashrec.errors import ConfigError
from flashrec_harness.dialects import Reply as Beam
from flashrec_harness.http_client import Reply
from flashrec_harness.load import poisson_arrivals
from flashrec_harness.outcome import Outcome, SuiteContext
from flashrec_harness.overload import fleet
from flashrec_harness.overload.fleet import Shot
from flashrec_harness.perf import subjects
from flashrec_harness.perf.subjects import HttpSubject, Threads
from flashrec_harness.perf.suite import PerfSettings, judge_workload
from flashrec_harness.perf.sweep import Point, check, measure_sweep
from flashrec_harness.perf.worker import prompts_of
from flashrec_harness.perf.workload import Cell, Sweep, from_json, load_workload

SERVICE_S = 0.008


class OneServer(Threads):
    """Answers one request at a time, in 8 ms: at most 125 a second, whatever arrives."""

    def __init__(self) -> None:
        self._busy = threading.Lock()
        self.flushed = 0

    def flush(self) -> None:
        self.flushed += 1

    def send(self, _: int) -> None:
        with self._busy:
            time.sleep(SERVICE_S)


def test_the_knee_of_a_queue_lies_at_its_capacity() -> None:
    sweep = Sweep(n=10, shares=(0.2, 1.6), target_ms=80.0, concurrency=4, seconds=1.0)
    server = OneServer()
    found = measure_sweep(server, sweep, seed=0)  # type: ignore[arg-type]
    assert server.flushed == 0
    below, above = (Point(**point) for point in found["points"])
    assert found["capacity"] < 1 / SERVICE_S
    assert below.rate == pytest.approx(0.2 * found["capacity"])
    assert below.p99_ms < 80 < above.p99_ms
    assert below.goodput == pytest.approx(below.throughput)
    assert above.goodput < 0.6 * above.rate
    assert above.throughput < 1 / SERVICE_S


def test_a_sweep_of_random_prompts_begins_each_load_with_an_empty_cache() -> None:
    server = OneServer()
    sweep = Sweep(n=10, context=8, shares=(0.2, 0.4), target_ms=80.0, concurrency=2, seconds=0.1)
    measure_sweep(server, sweep, seed=0)  # type: ignore[arg-type]
    assert server.flushed == 3 + len(sweep.shares)
    arrivals = load_workload("arrivals")
    assert arrivals.sweep is not None
    drawn = prompts_of(Drawing(), arrivals, arrivals.sweep)  # type: ignore[arg-type]
    assert drawn == [(303, 4096)]


class Spelling:
    """A dialect of single numbers."""

    path = "/generate"

    def body(self, prompt: Sequence[int], n: int, max_tokens: int | None) -> int:
        return 10 * prompt[0] + n

    def beams(self, answer: int) -> list[Beam]:
        return [Beam((answer,), None, None)]


def test_client_processes_share_a_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load of two processes as one: due times in order, a refusal and a lost request as failures."""
    monkeypatch.setattr(fleet, "ProcessPoolExecutor", mock.MagicMock())

    monkeypatch.setattr(subjects, "dialect_of", lambda _: Spelling())
    server = HttpSubject("http://nowhere")
    server.prepare(Cell(n=3, concurrency=4, drive="closed"), [(number,) for number in range(4)], clients=2)
    plans: list[fleet.Plan] = []
    shots = [Shot(200, 0.1, 1001.0, late=0.2), Shot(503, 0.0, 1000.6), Shot(200, 0.5, 1000.5)]

    def load(requests: int, concurrency: int, rate: float | None, seed: int, *, keep: bool) -> fleet.Load:
        assert keep
        plans.extend(server._fleet.plans(requests, concurrency, rate, seed))
        return fleet.Load(shots, 0.0, {1: b"13"}, ["HangError: silence"])

    monkeypatch.setattr(server._fleet, "load", load)
    found = server.open(3, 8.0, seed=5)
    assert [plan.payloads for plan in plans] == [[b"3", b"23"], [b"13", b"33"]]
    due = poisson_arrivals(3, 8.0, 5)
    assert [(plan.requests, plan.dues) for plan in plans] == [(2, due[::2]), (1, due[1::2])]
    assert [answer.due for answer in found.answers] == pytest.approx([0.0, 0.6, 0.7])
    assert [answer.error for answer in found.answers] == ["", "HTTP 503", ""]
    assert found.latencies_ms == pytest.approx([500, 300])
    assert found.wall_s == pytest.approx(1.0)
    assert server.outputs_digest() == subjects.digest_outputs({1: [[13]]})
    plans.clear()
    found = server.closed(5, 3)
    assert [(plan.first, plan.requests, plan.concurrency) for plan in plans] == [(0, 1, 1), (0, 4, 2)]
    assert [answer.error for answer in found.answers[3:]] == ["HangError: silence", "no answer"]
    with pytest.raises(RuntimeError, match="none of 4 requests was answered: is the server gone"):
        fleet.Load([], 0.0).result(4)
    with pytest.raises(RuntimeError, match="none of 4 requests was answered: ConnectionError: half"):
        fleet.Load([], 0.0, lost=["ConnectionError: half"]).result(4)
    for address in ("https://nowhere", "http://nowhere/prefix"):
        context = SuiteContext(model_path=Path("m"), url=address)
        with pytest.raises(ConfigError, match="without TLS or a path"):
            judge_workload(context, PerfSettings(), None)
    with pytest.raises(ConfigError, match="clients must lie in 1 to concurrency"):
        Sweep(n=1, shares=(0.5,), target_ms=1.0, concurrency=4, clients=5)


@pytest.mark.parametrize(
    ("cores", "concurrency", "clients"), [(16, 32, 8), (16, 1, 1), (16, 13, 8), (16, 7, 7), (2, 32, 1), (4, 32, 2)]
)
def test_half_of_the_cores_send_a_closed_loop(
    monkeypatch: pytest.MonkeyPatch, cores: int, concurrency: int, clients: int
) -> None:
    monkeypatch.setattr(subjects.os, "sched_getaffinity", lambda _: set(range(cores)))
    assert subjects._clients_for(Cell(n=1, concurrency=concurrency, drive="closed")) == clients
    assert subjects._clients_for(Cell(n=1, rate=5.0, drive="open")) == min(8, cores // 2)


def test_a_backlog_of_the_clients_counts_as_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread for ten arrivals within a few milliseconds, each answered in 20."""

    class Slow:
        def __init__(self, url: str) -> None: ...

        def __enter__(self) -> Slow:
            return self

        def __exit__(self, *_: object) -> None: ...

        def post(self, path: str, body: bytes, *, awake: bool = False) -> Reply:
            time.sleep(0.02)
            return Reply(200, b"")

    monkeypatch.setattr(fleet, "Client", Slow)
    monkeypatch.setattr(fleet, "THREADS", 1)
    shots = fleet.Fleet("http://nowhere", [b""], 1).load(10, 1, rate=2000.0).shots
    slowest = max(fleet.Load(shots, 0.0).result(10).latencies_ms)
    assert 180 <= slowest < 1000
    assert statistics.median(shot.seconds for shot in shots) < 0.1


class Drawing:
    """Says what it was asked for in place of prompts."""

    def random_prompts(self, count: int, tokens: int, _: int) -> list[tuple[int, int]]:
        return [(tokens, count)]


def found_in(*processes: list[Point]) -> list[dict[str, Any]]:
    return [{"capacity": 100.0, "points": [asdict(point) for point in points]} for points in processes]


def point(share: float, p99_ms: float, goodput: float, failures: int = 0) -> Point:
    return Point(share, 100 * share, 100 * share, goodput, p99_ms / 2, p99_ms, failures)


def test_the_report_names_the_highest_rate_that_keeps_the_target() -> None:
    sweep = Sweep(n=10, shares=(0.5, 0.8, 1.0), target_ms=100.0)
    runs = found_in(
        [point(0.5, 20, 50), point(0.8, 90, 79), point(1.0, 300, 60)],
        [point(0.5, 22, 50), point(0.8, 95, 78), point(1.0, 500, 40)],
        [point(0.5, 21, 50), point(0.8, 300, 30), point(1.0, 400, 50)],
    )
    (found,) = check(runs, workload(sweep=sweep))
    assert found.outcome is Outcome.PASS
    assert "p99 stays within 100 ms up to 80 arrivals/s, 80% of the closed loop's 100 req/s" in found.summary
    assert [row["p99 ms"] for row in found.rows] == [21, 95, 400]
    assert [row["good/s (100 ms)"] for row in found.rows] == [50, 78, 50]
    assert [plot.title for plot in found.plots] == ["goodput over arrival rate", "latency over arrival rate"]


def test_a_rate_with_a_failed_request_keeps_nothing() -> None:
    sweep = Sweep(n=10, shares=(0.5, 0.8), target_ms=100.0)
    (found,) = check(found_in([point(0.5, 20, 50), point(0.8, 20, 80, failures=1)]), workload(sweep=sweep))
    assert "up to 50 arrivals/s" in found.summary
    (none,) = check(found_in([point(0.5, 200, 0), point(0.8, 300, 0)]), workload(sweep=sweep))
    assert "above 100 ms at every rate" in none.summary


def test_a_workload_without_a_sweep_reports_none() -> None:
    assert check(found_in([point(0.5, 20, 50)]), workload()) == []


def test_sweeps_in_workload_files() -> None:
    serving = load_workload("serving")
    assert serving.sweep is not None
    assert from_json(asdict(serving)) == serving
    assert serving.narrowed(5, None).sweep is None
    assert serving.fingerprint() == load_workload("serving").fingerprint()
    for wrong in ({"shares": ()}, {"shares": (0.5, 0.2)}, {"shares": (0.0, 0.2)}, {"target_ms": 0.0}):
        with pytest.raises(ConfigError, match="sweep"):
            Sweep(**({"n": 10, "shares": (0.5,), "target_ms": 100.0} | wrong))
    with pytest.raises(ConfigError, match="wider than any cell"):
        workload(sweep=Sweep(n=11, shares=(0.5,), target_ms=1.0))
