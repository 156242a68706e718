"""The engine thread: a bounded queue, deadlines, cancellation, draining, and faults that answer everyone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from server_support import wait_until
from tiny_engine import ask, open_engine, write_shop

from flashrec import Engine, RequestError, Result
from flashrec.errors import CaptureError, DeadlineError, EngineFault, NonFiniteError, QueueFullError
from flashrec.request import ScoreSpace
from flashrec.runtime.flight import Flight
from flashrec.runtime.scheduler import Scheduler

PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shop(tmp_path_factory.mktemp("shop"))


@pytest.fixture(scope="module")
def engine(shop: Path) -> Iterator[Engine]:
    engine = open_engine(shop, queue_size=4)
    yield engine
    engine.close()


@pytest.fixture
def scheduler(engine: Engine) -> Iterator[Scheduler]:
    scheduler = Scheduler(engine)
    yield scheduler
    scheduler.close()


class Gate:
    """Holds the engine thread inside a wave until it is opened."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered = threading.Semaphore(0)
        self._open = threading.Event()
        self.waves: list[list[str]] = []
        real = engine.launch

        def launch(members: list[Any]) -> Any:
            self.waves.append([member.request.rid for member in members])
            self.entered.release()
            assert self._open.wait(PATIENCE_S)
            return real(members)

        monkeypatch.setattr(engine, "launch", launch)

    def wait(self) -> None:
        assert self.entered.acquire(timeout=PATIENCE_S)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(engine: Engine, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(engine, monkeypatch)
    yield gate
    gate.open()


def answer(future: Future[Result]) -> Result:
    return future.result(PATIENCE_S)


def test_answers_are_those_of_the_engine(engine: Engine, scheduler: Scheduler) -> None:
    requests = [ask(5 + seed, seed=seed, n=1 + seed, rid=f"r{seed}") for seed in range(4)]
    expected = [engine.generate([request])[0].beams for request in requests]
    scheduler.start()
    futures = [scheduler.submit(request) for request in requests]
    results = [answer(future) for future in futures]
    assert [result.beams for result in results] == expected
    assert [result.rid for result in results] == ["r0", "r1", "r2", "r3"]
    assert scheduler.queue_depth == 0


def test_a_request_is_answered_before_its_pages_go_back(
    engine: Engine, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Giving back the pages of a long prompt takes longer than answering."""
    answered: list[bool] = []
    real = engine.release

    def release(flight: Flight) -> None:
        answered.append(future.done())
        real(flight)

    monkeypatch.setattr(engine, "release", release)
    future = scheduler.submit(ask(5))
    scheduler.start()
    answer(future)
    assert scheduler.drain(PATIENCE_S)
    assert answered == [True]
    assert engine.parts.pool.free_pages + engine.parts.cache.cached_pages == engine.parts.pool.usable_pages


def test_what_fails_behind_an_answer_leaves_nobody_waiting(
    engine: Engine, scheduler: Scheduler, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = engine.release

    def release(flight: Flight) -> None:
        real(flight)
        raise RuntimeError("pages lost")

    monkeypatch.setattr(engine, "release", release)
    scheduler.start()
    answered, cancelled = scheduler.submit_all([ask(5, rid="a"), ask(5, rid="b")])
    gate.wait()
    waiting = scheduler.submit(ask(4))
    cancelled.cancel()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(scheduler.flush_cache)
        wait_until(lambda: bool(scheduler._calls))
        gate.open()
        assert answer(answered).beams
        with pytest.raises(EngineFault, match="pages lost"):
            answer(waiting)
        call.result(PATIENCE_S)


@pytest.mark.parametrize(("count", "told"), [(1, [1, 0]), (2, [0, 0])])
def test_who_watches_is_told_before_the_launch_unless_the_device_waits_for_it(
    engine: Engine, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch, count: int, told: list[int]
) -> None:
    """As on a GPU: of one request that is alone the launch comes first."""
    monkeypatch.setattr(Engine, "waves_in_flight", 2)
    depth, seen = [count], list[int]()
    real = engine.launch
    monkeypatch.setattr(scheduler, "on_change", lambda: depth.append(scheduler.queue_depth))

    def launch(members: list[Any]) -> Any:
        seen.append(depth[-1])
        return real(members)

    monkeypatch.setattr(engine, "launch", launch)
    futures = scheduler.submit_all([ask(5, seed=seed) for seed in range(count)])
    scheduler.start()
    for future in futures:
        answer(future)
    assert scheduler.drain(PATIENCE_S)
    assert [seen[0], depth[-1]] == told


def test_an_invalid_request_is_refused_on_the_callers_thread(scheduler: Scheduler) -> None:
    scheduler.start()
    with pytest.raises(RequestError, match="n: must be at least 1"):
        scheduler.submit(ask(5, n=0))
    assert scheduler.queue_depth == 0


def test_what_waits_while_a_wave_runs_shares_the_next(scheduler: Scheduler, gate: Gate) -> None:
    scheduler.start()
    first = scheduler.submit(ask(5, rid="first"))
    gate.wait()
    others = [scheduler.submit(ask(5, seed=seed, rid=f"other{seed}")) for seed in range(3)]
    assert scheduler.queue_depth == 3
    gate.open()
    for future in (first, *others):
        answer(future)
    assert gate.waves == [["first"], ["other0", "other1", "other2"]]


def test_a_wave_is_admitted_in_view_of_the_one_in_flight(
    engine: Engine, scheduler: Scheduler, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where two waves may be in flight."""
    monkeypatch.setattr(Engine, "waves_in_flight", 2)
    admit, seen = engine.admission.admit, list[int]()
    monkeypatch.setattr(
        engine.admission,
        "admit",
        lambda waiting, now, in_flight: seen.append(in_flight) or admit(waiting, now, in_flight),
    )
    scheduler.start()
    futures = scheduler.submit_all([ask(3, rid="a"), ask(4, rid="b")])
    gate.wait()
    futures.append(scheduler.submit(ask(5, rid="c")))
    gate.open()
    for future in futures:
        answer(future)
    assert gate.waves == [["a", "b"], ["c"]]
    assert seen == [0, 2]


def test_a_full_queue_refuses_and_recovers(scheduler: Scheduler, gate: Gate) -> None:
    scheduler.start()
    running = scheduler.submit(ask(5))
    gate.wait()
    waiting = [scheduler.submit(ask(5, seed=seed)) for seed in range(4)]
    with pytest.raises(QueueFullError, match="4 requests wait already"):
        scheduler.submit(ask(5, seed=9))
    gate.open()
    for future in (running, *waiting):
        answer(future)
    answer(scheduler.submit(ask(5, seed=9)))


def test_whoever_watches_sees_the_queue_empty_again(scheduler: Scheduler, gate: Gate) -> None:
    """Also where all that waited was cancelled, so that no wave follows: a full queue must not be told for ever."""
    told: list[tuple[int, int]] = []
    scheduler.on_change = lambda: told.append((scheduler.queue_depth, scheduler.rows_in_flight))
    scheduler.start()
    running = scheduler.submit(ask(5, rid="running"))
    gate.wait()
    for seed in range(4):
        scheduler.submit(ask(5, seed=seed, rid=f"w{seed}"))
    for rid in ("running", "w0", "w1", "w2", "w3"):
        scheduler.cancel(rid)
    gate.open()
    wait_until(lambda: bool(told) and told[-1] == (0, 0))
    assert running.cancelled()


def test_a_list_is_queued_whole_or_not_at_all(scheduler: Scheduler, gate: Gate) -> None:
    scheduler.start()
    running = scheduler.submit(ask(5))
    gate.wait()
    waiting = scheduler.submit_all([ask(5, seed=seed) for seed in range(2)])
    with pytest.raises(QueueFullError, match="2 requests wait already"):
        scheduler.submit_all([ask(5, seed=seed) for seed in range(3)])
    with pytest.raises(RequestError, match=r"^n\[1\]: "):
        scheduler.submit_all([ask(5), ask(5, n=0)])
    assert scheduler.queue_depth == 2
    gate.open()
    for future in (running, *waiting):
        answer(future)


def test_a_deadline_that_passes_while_waiting_takes_no_row(scheduler: Scheduler, gate: Gate) -> None:
    scheduler.start()
    running = scheduler.submit(ask(5, rid="running"))
    gate.wait()
    late = scheduler.submit(ask(5, seed=1, rid="late"), deadline=time.monotonic() + 0.01)
    time.sleep(0.03)
    gate.open()
    answer(running)
    with pytest.raises(DeadlineError, match="while the request waited"):
        answer(late)
    assert gate.waves == [["running"]]


def test_a_deadline_that_passes_while_running_is_said_so(scheduler: Scheduler, gate: Gate) -> None:
    scheduler.start()
    future = scheduler.submit(ask(5), deadline=time.monotonic() + 0.05)
    gate.wait()
    time.sleep(0.08)
    gate.open()
    with pytest.raises(DeadlineError, match="while the request ran"):
        answer(future)


@pytest.mark.parametrize("how", ["by id", "by future"])
def test_a_cancelled_request_takes_no_row(scheduler: Scheduler, gate: Gate, how: str) -> None:
    scheduler.start()
    running = scheduler.submit(ask(5, rid="running"))
    gate.wait()
    dropped = scheduler.submit(ask(5, seed=1, rid="dropped"))
    kept = scheduler.submit(ask(5, seed=2, rid="kept"))
    if how == "by id":
        scheduler.cancel("dropped")
    else:
        dropped.cancel()
    gate.open()
    answer(running)
    answer(kept)
    with pytest.raises(CancelledError):
        answer(dropped)
    assert gate.waves == [["running"], ["kept"]]


def test_a_request_cancelled_while_it_runs_is_answered_to_nobody(
    engine: Engine, scheduler: Scheduler, gate: Gate
) -> None:
    scheduler.start()
    dropped = scheduler.submit(ask(5, rid="dropped"))
    gate.wait()
    scheduler.cancel("dropped")
    gate.open()
    answer(scheduler.submit(ask(5, seed=1)))
    assert dropped.cancelled()
    stats = engine.stats()
    assert stats["free_pages"] + stats["cached_pages"] == stats["usable_pages"]


def test_draining_refuses_newcomers_and_finishes_the_rest(scheduler: Scheduler, gate: Gate) -> None:
    scheduler.start()
    running = scheduler.submit(ask(5))
    gate.wait()
    waiting = scheduler.submit(ask(5, seed=1))
    assert scheduler.drain(timeout=0.05) is False
    with pytest.raises(EngineFault, match="shutting down"):
        scheduler.submit(ask(5, seed=2))
    gate.open()
    assert scheduler.drain(timeout=PATIENCE_S) is True
    assert answer(running).beams
    assert answer(waiting).beams


def test_closing_answers_what_waits(scheduler: Scheduler, gate: Gate) -> None:
    scheduler.start()
    running = scheduler.submit(ask(5))
    gate.wait()
    waiting = scheduler.submit(ask(5, seed=1))
    closer = threading.Thread(target=scheduler.close)
    closer.start()
    with pytest.raises(EngineFault, match="shutting down"):
        answer(waiting)
    gate.open()
    closer.join(PATIENCE_S)
    assert not closer.is_alive()
    assert answer(running).beams


def test_a_fault_answers_everyone_and_those_who_come_later(
    engine: Engine, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, release = threading.Event(), threading.Event()

    def launch(_: list[Any]) -> Any:
        entered.set()
        release.wait(PATIENCE_S)
        raise (
            torch.AcceleratorError("device lost") if hasattr(torch, "AcceleratorError") else RuntimeError("device lost")
        )

    monkeypatch.setattr(engine, "launch", launch)
    scheduler.start()
    running = scheduler.submit(ask(5))
    assert entered.wait(PATIENCE_S)
    waiting = scheduler.submit(ask(5, seed=1))
    release.set()
    for future in (running, waiting):
        with pytest.raises(EngineFault, match="device lost"):
            answer(future)
    with pytest.raises(EngineFault, match="device lost"):
        scheduler.submit(ask(5, seed=2))
    with pytest.raises(EngineFault, match="device lost"):
        scheduler.flush_cache()
    assert scheduler.queue_depth == 0


def test_a_wave_whose_program_cannot_be_captured_fails_alone(
    engine: Engine, scheduler: Scheduler, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs beyond those of the start are captured when first used, and there may be no memory left by then."""
    real = engine.stage.run

    def run(members: list[Any], *arguments: Any) -> torch.Tensor:
        if members[0].key.space is ScoreSpace.VOCAB:
            raise CaptureError("CUDA graph capture of the vocab program failed at x.py:1 (y): out of memory")
        return real(members, *arguments)

    monkeypatch.setattr(engine.stage, "run", run)
    scheduler.start()
    gate.open()
    free = engine.parts.pool.free_pages
    refused = scheduler.submit(ask(5, score_space=ScoreSpace.VOCAB))
    with pytest.raises(CaptureError, match="out of memory"):
        refused.result(PATIENCE_S)
    assert engine.parts.pool.free_pages == free
    assert scheduler.rows_in_flight == 0
    assert answer(scheduler.submit(ask(5, seed=1))).beams
    assert scheduler.fault is None


def test_a_request_that_is_not_finite_fails_alone(engine: Engine, scheduler: Scheduler, gate: Gate) -> None:
    good, bad = ask(5, seed=3, n=4, rid="good"), ask(6, seed=4, n=4, rid="bad")
    word = next(token for token in bad.input_ids if token not in good.input_ids)
    embedding = engine.parts.model.embedding  # type: ignore[attr-defined]
    row = embedding[word].clone()
    engine.flush_cache()
    try:
        with torch.inference_mode():
            embedding[word] = torch.nan
        scheduler.start()
        first = scheduler.submit(ask(4, seed=3))
        gate.wait()
        futures = scheduler.submit(good), scheduler.submit(bad)
        gate.open()
        first.exception(PATIENCE_S)
        assert answer(futures[0]).beams
        with pytest.raises(NonFiniteError, match="'bad'"):
            answer(futures[1])
        assert gate.waves[1] == ["good", "bad"]
        answer(scheduler.submit(good))
    finally:
        with torch.inference_mode():
            embedding[word] = row
        scheduler.flush_cache()


def test_calls_run_between_waves_and_hand_back_their_error(
    engine: Engine, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler.start()
    answer(scheduler.submit(ask(9, seed=5)))
    assert scheduler.flush_cache() > 0
    assert scheduler.flush_cache() == 0

    def broken() -> int:
        raise RuntimeError("planted")

    monkeypatch.setattr(engine, "flush_cache", broken)
    with pytest.raises(RuntimeError, match="planted"):
        scheduler.flush_cache()
    answer(scheduler.submit(ask(9, seed=5)))


def test_many_threads_each_get_their_own_answer(engine: Engine, shop: Path) -> None:
    wide = open_engine(shop, queue_size=64)
    scheduler = Scheduler(wide)
    requests = [ask(3 + seed % 17, seed=seed, n=1 + seed % 6, rid=str(seed)) for seed in range(24)]
    expected = {request.rid: engine.generate([request])[0].beams for request in requests}
    got: dict[str, object] = {}

    def client(mine: list[Any]) -> None:
        for request in mine:
            got[request.rid] = answer(scheduler.submit(request)).beams

    scheduler.start()
    clients = [threading.Thread(target=client, args=(requests[first::6],)) for first in range(6)]
    for thread in clients:
        thread.start()
    try:
        for thread in clients:
            thread.join(PATIENCE_S)
        assert got == expected
    finally:
        scheduler.close()
        wide.close()
