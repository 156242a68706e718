"""Load generators: concurrency, arrivals, failures, and that waiting counts."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from flashrec_harness import load


class Clock:
    """A clock that moves only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_closed_loop_keeps_exactly_the_concurrency_busy() -> None:
    lock, in_flight, seen = threading.Lock(), 0, []
    full = threading.Barrier(4, timeout=10)

    def send(index: int) -> None:
        nonlocal in_flight
        with lock:
            in_flight += 1
            seen.append(in_flight)
        if index < 4:
            full.wait()
        with lock:
            in_flight -= 1

    result = load.closed_loop(send, 20, 4)
    assert max(seen) == 4
    assert [answer.index for answer in result.answers] == list(range(20))
    assert not result.failures


def test_failures_are_kept_and_do_not_count_as_throughput() -> None:
    def send(index: int) -> None:
        if index % 4 == 0:
            raise ConnectionError(f"gone {index}")

    result = load.closed_loop(send, 8, 2)
    assert [answer.error for answer in result.failures] == ["ConnectionError: gone 0", "ConnectionError: gone 4"]
    assert len(result.latencies_ms) == 6
    assert result.throughput == pytest.approx(6 / result.wall_s)


def test_batches_run_in_lockstep_and_share_their_latency() -> None:
    clock = Clock()

    def generate(numbers: object) -> None:
        assert isinstance(numbers, range)
        clock.now += 0.1 + 0.01 * len(numbers)

    result = load.batches(generate, 10, 4, clock=clock)
    assert result.latencies_ms == pytest.approx([140] * 8 + [120] * 2)
    assert result.throughput == pytest.approx(10 / 0.4)


def test_a_batch_that_raises_fails_whole() -> None:
    def generate(numbers: object) -> None:
        raise MemoryError("full")

    assert len(load.batches(generate, 3, 2, clock=Clock()).failures) == 3


def test_poisson_arrivals_have_the_rate_and_are_seeded() -> None:
    arrivals = load.poisson_arrivals(20_000, 50.0, seed=3)
    gaps = np.diff([0.0, *arrivals])
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.03)
    assert arrivals == load.poisson_arrivals(20_000, 50.0, seed=3)
    assert arrivals != load.poisson_arrivals(20_000, 50.0, seed=4)


def test_open_loop_charges_a_stall_to_everything_that_should_have_arrived() -> None:
    """One server at a time, the first request stalls: later ones answer fast but were due long before."""
    server = threading.Lock()

    def send(index: int) -> None:
        with server:
            time.sleep(0.3 if index == 0 else 0.001)

    result = load.open_loop(send, 10, rate=200.0, seed=1, max_in_flight=16)
    assert min(result.latencies_ms) > 100
    assert result.goodput(50) == 0.0
    assert result.goodput(10_000) == pytest.approx(result.throughput)


def test_percentile_is_numpys_linear() -> None:
    assert load.percentile([1, 2, 3, 4], 50) == 2.5
    assert load.percentile([10.0], 99) == 10.0
