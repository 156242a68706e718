"""Busy polling: for whom a front stays awake, and for how long."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashrec.front import polling, serve
from flashrec.front.polling import BusyPolling
from flashrec.server.lifecycle import Places


class Loop:
    """An event loop that counts the rounds that it is asked for."""

    def __init__(self) -> None:
        self.next: list[Callable[[], None]] = []

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.next.append(callback)

    def rounds(self, most: int) -> int:
        """Run round after round; how many it took until nothing was to be done, at most ``most``."""
        for count in range(most):
            if not self.next:
                return count
            due, self.next = self.next, []
            for callback in due:
                callback()
        return most


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(polling, "time", clock)
    return clock


def polled(counts: list[int], own: int = 0) -> tuple[Any, Places]:
    loop = Loop()
    places = Places(counts, own)
    BusyPolling(loop, places)  # type: ignore[arg-type]
    return loop, places


def test_a_front_polls_while_it_holds_the_only_request(clock: Clock) -> None:
    loop, places = polled([0, 0])
    assert loop.rounds(10) == 0
    places.take()
    assert loop.rounds(10) == 10
    clock.now += polling._AWAKE_S / 2
    assert loop.rounds(10) == 10
    places.give()
    assert loop.rounds(10) == 10, "whoever is answered asks again soon"
    clock.now += polling._LINGER_S
    assert loop.rounds(10) == 1
    places.take()
    assert loop.rounds(10) == 10, "the next request wakes it again"


def test_a_long_search_lets_it_sleep(clock: Clock) -> None:
    loop, places = polled([0])
    places.take()
    clock.now += polling._AWAKE_S
    assert loop.rounds(10) == 1
    places.give()
    assert loop.rounds(10) == 10


def test_no_front_polls_while_the_server_holds_several_requests(clock: Clock) -> None:
    counts = [0, 1]
    loop, places = polled(counts)
    places.take()
    assert loop.rounds(10) == 0
    counts[1] = 0
    places.give()
    places.take()
    assert loop.rounds(10) == 10
    counts[1] = 1  # another front's
    assert loop.rounds(10) == 1


def test_no_front_polls_while_a_thread_works_for_its_request(clock: Clock) -> None:
    loop, places = polled([0])
    places.take()
    assert loop.rounds(10) == 10
    with places.hand_over():
        assert loop.rounds(10) == 1
        places.on_change()
        assert loop.rounds(10) == 0
    assert loop.rounds(10) == 10, "back on the loop"


def test_one_round_follows_another_and_not_two(clock: Clock) -> None:
    loop, places = polled([0])
    for _ in range(5):
        places.take()
        places.give()
    loop.rounds(3)
    assert len(loop.next) == 1


def test_a_real_loop_sleeps_afterwards() -> None:
    async def run() -> int:
        loop = asyncio.get_running_loop()
        places = Places()
        BusyPolling(loop, places)
        places.take()
        places.give()
        await asyncio.sleep(20 * polling._LINGER_S)
        return len(loop._ready)  # type: ignore[attr-defined]

    assert asyncio.run(run()) == 0


@pytest.mark.parametrize(("device", "cores", "expected"), [("cuda", 16, True), ("cuda", 4, False), ("cpu", 16, False)])
def test_the_default_is_for_gpus_on_hosts_with_cores_to_spare(
    monkeypatch: pytest.MonkeyPatch, device: str, cores: int, expected: bool
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    config: Any = SimpleNamespace(torch_device=torch.device(device))
    assert serve._polls_by_default(config) is expected
