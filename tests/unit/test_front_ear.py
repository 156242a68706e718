"""Who hears the fronts: the ear's own thread, or the engine's while it is idle; and what both owe them."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from server_support import wait_until
from test_front import connect

from flashrec import Engine, EngineConfig, Request
from flashrec.errors import EngineFault
from flashrec.front import ear as ears
from flashrec.front import link as links
from flashrec.front.board import Board
from flashrec.front.desk import Desk
from flashrec.front.ear import Ear
from flashrec.front.hub import Hub
from flashrec.front.link import Link
from flashrec.front.wire import Submit
from flashrec.profiler import ProfileOptions
from flashrec.runtime.scheduler import Scheduler

SHOP = Path("engine/flashrec/assets/tiny-shop")
OWN = "flashrec-hear"


class Voice:
    """A front as the ear has it: what it said, and on which thread that was heard."""

    def __init__(self, ear: Ear) -> None:
        ours, theirs = multiprocessing.Pipe()
        self.link = Link(theirs)
        self.said: list[tuple[object, str]] = []
        self.gone: list[str] = []
        ear.add(Link(ours), self._heard, lambda: self.gone.append(threading.current_thread().name))

    def _heard(self, message: object) -> None:
        if message == "bad":
            raise ValueError(message)
        self.said.append((message, threading.current_thread().name))

    def say(self, message: object) -> None:
        """And wait until it is heard."""
        before = len(self.said)
        self.link.send(message)
        wait_until(lambda: len(self.said) > before)


@pytest.fixture
def ear() -> Iterator[Ear]:
    ear = Ear()
    yield ear
    ear.close()


@pytest.fixture
def borrower() -> Iterator[ThreadPoolExecutor]:
    """One thread, as the engine's: it listens, and leaves."""
    with ThreadPoolExecutor(1, thread_name_prefix="engine") as pool:
        yield pool


def borrow(borrower: ThreadPoolExecutor, ear: Ear, until: Callable[[], bool]) -> Future[None]:
    """Have the borrower listen; it does when this returns."""
    began = threading.Event()

    def over() -> bool:
        began.set()
        return until()

    listening = borrower.submit(ear.listen, over)
    assert began.wait(5)
    return listening


def named(prefix: str, said: list[tuple[object, str]]) -> list[object]:
    return [message for message, name in said if name.startswith(prefix)]


def test_all_fronts_are_heard_in_order(ear: Ear) -> None:
    voices = [Voice(ear) for _ in range(3)]
    for number in range(20):
        for voice in voices:
            voice.link.send(number, -number)
    wait_until(lambda: all(len(voice.said) == 40 for voice in voices))
    expected = [sign * number for number in range(20) for sign in (1, -1)]
    for voice in voices:
        assert named(OWN, voice.said) == expected


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Listening, and being busy, for as long as a test may take."""
    monkeypatch.setattr(ears, "_AWAKE_S", 60.0)
    monkeypatch.setattr(ears, "_LATEST_S", 60.0)


@pytest.mark.usefixtures("patient")
def test_whoever_listens_hears_and_the_other_thread_waits_until_it_has_left(
    ear: Ear, borrower: ThreadPoolExecutor
) -> None:
    voice = Voice(ear)
    voice.say("before")
    listening = borrow(borrower, ear, lambda: "second" in dict(voice.said))
    voice.say("first")
    voice.say("second")
    listening.result(5)
    voice.link.send("third")
    time.sleep(0.05)
    assert named("engine", voice.said) == ["first", "second"]
    assert len(voice.said) == 3, "the one who listened has not left, and does not hear"
    borrower.submit(ear.leave).result(5)
    wait_until(lambda: len(voice.said) == 4)
    assert named(OWN, voice.said) == ["before", "third"]


@pytest.mark.usefixtures("patient")
def test_nobody_is_deaf_for_long_because_the_engine_is_busy(
    ear: Ear, borrower: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It captures a graph, say, and has not left."""
    monkeypatch.setattr(ears, "_LATEST_S", 0.1)
    voice = Voice(ear)
    borrow(borrower, ear, lambda: bool(voice.said))
    voice.say("a request")
    start = time.monotonic()
    voice.say("another")
    assert time.monotonic() - start < 2.0
    assert named(OWN, voice.said) == ["another"]
    borrower.submit(ear.leave).result(5)
    voice.say("after")
    listening = borrow(borrower, ear, lambda: len(voice.said) > 3)
    voice.say("heard by the engine again")
    listening.result(5)
    assert voice.said[-1][1].startswith("engine")


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("listener", ["own", "engine"])
def test_a_front_that_stops_in_the_middle_of_a_message_holds_up_nobody(
    ear: Ear, borrower: ThreadPoolExecutor, listener: str
) -> None:
    halting, going_on = Voice(ear), Voice(ear)
    parcel = links._parcel(("x" * 100_000, "y"))
    listening = borrow(borrower, ear, lambda: len(halting.said) == 2) if listener == "engine" else None
    places = [0, 3, 8, 60_000, len(parcel)]  # in the header, behind it, in the middle
    for number, (start, end) in enumerate(pairwise(places)):
        os.write(halting.link.fileno(), parcel[start:end])
        if number < 2:
            going_on.say(number)
        assert halting.said == [] or end == len(parcel)
    wait_until(lambda: len(halting.said) == 2)
    if listening is not None:
        listening.result(5)
        borrower.submit(ear.leave).result(5)
    assert [len(str(message)) for message, _ in halting.said] == [100_000, 1]
    assert [message for message, _ in going_on.said] == [0, 1]


def test_listening_ends_by_itself_and_the_own_thread_takes_over(ear: Ear, borrower: ThreadPoolExecutor) -> None:
    voice = Voice(ear)
    start = time.monotonic()
    borrower.submit(ear.listen, lambda: False).result(5)
    assert 0.01 <= time.monotonic() - start < 1.0
    voice.say("after")
    assert named(OWN, voice.said) == ["after"]
    borrower.submit(ear.leave).result(5)  # once more does nothing
    voice.say("again")
    assert named(OWN, voice.said) == ["after", "again"]


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("end", ["hangs up", "bad"])
def test_a_front_that_goes_while_the_engine_listens_takes_nobody_with_it(
    ear: Ear, borrower: ThreadPoolExecutor, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    going, staying = Voice(ear), Voice(ear)
    listening = borrow(borrower, ear, lambda: bool(staying.said))
    if end == "bad":
        going.link.send("bad")
    else:
        going.link.close()
    wait_until(lambda: bool(going.gone))
    staying.say("here")
    listening.result(5)
    borrower.submit(ear.leave).result(5)
    staying.say("still")
    assert [name[:6] for name in going.gone] == ["engine"], "once"
    assert [message for message, _ in staying.said] == ["here", "still"]
    assert ("can no longer be served" in caplog.text) is (end == "bad")


@pytest.mark.usefixtures("patient")
def test_the_ear_is_closed_while_the_engine_listens(borrower: ThreadPoolExecutor) -> None:
    ear, over = Ear(), threading.Event()
    listening = borrow(borrower, ear, over.is_set)
    with ThreadPoolExecutor(1) as closer:
        closing = closer.submit(ear.close)
        over.set()
        listening.result(5)
        borrower.submit(ear.leave).result(5)
        closing.result(5)
    ear.close()  # once more does nothing, as does listening
    borrower.submit(ear.listen, lambda: False).result(5)
    assert not ear._thread.is_alive()


def test_listening_is_given_up_where_the_other_thread_does_not_let_go(ear: Ear, borrower: ThreadPoolExecutor) -> None:
    """It is doing what a front has asked for, and that takes longer than it may."""
    voice, begun, release = Voice(ear), threading.Event(), threading.Event()
    ours, theirs = multiprocessing.Pipe()

    def take_long(_: object) -> None:
        begun.set()
        release.wait(10)

    ear.add(Link(ours), take_long, lambda: None)
    slow = Link(theirs)
    slow.send("take long")
    assert begun.wait(5)
    borrower.submit(ear.listen, lambda: False).result(5)
    release.set()
    voice.say("after")
    assert named(OWN, voice.said) == ["after"]


def test_both_take_turns_thousands_of_times_and_nothing_is_lost(ear: Ear, borrower: ThreadPoolExecutor) -> None:
    """A thread that takes the ear and gives it back as fast as it can, and two fronts that never stop."""
    voices, over = [Voice(ear), Voice(ear)], threading.Event()

    def take_turns() -> int:
        turns = 0
        while not over.is_set():
            heard = [len(voice.said) for voice in voices]
            ear.listen(lambda heard=heard: over.is_set() or [len(voice.said) for voice in voices] != heard)
            ear.leave()
            turns += 1
            time.sleep(0.0003 * (turns % 2))
        return turns

    def listeners() -> set[str]:
        return {name[:6] for voice in voices for _, name in voice.said}

    turning = borrower.submit(take_turns)
    sent, end = 0, time.monotonic() + 60
    while sent < 1500 or (listeners() != {"engine", OWN[:6]} and time.monotonic() < end):
        for number in range(sent, sent + 100):
            for voice in voices:
                voice.link.send(number)
        sent += 100
        time.sleep(0.002)
    wait_until(lambda: all(len(voice.said) == sent for voice in voices))
    over.set()
    assert turning.result(5) > 10
    for voice in voices:
        assert [message for message, _ in voice.said] == list(range(sent))
    assert listeners() == {"engine", OWN[:6]}


def test_a_pipe_is_written_at_once_only_where_that_takes_no_waiting() -> None:
    ours, theirs = multiprocessing.Pipe()
    link, other = Link(ours), Link(theirs)
    assert link.send_at_once("small")
    assert other.receive() == ("small",)
    assert not link.send_at_once(b"x" * (1 << 16)), "longer than what surely fits"
    sent = 0
    start = time.monotonic()
    while link.send_at_once(b"x" * 30_000):
        sent += 1
    assert time.monotonic() - start < 1.0, "nobody reads, and nobody waited"
    assert sent >= 1
    assert [len(other.receive()[0]) for _ in range(sent)] == [30_000] * sent
    with link._sending:
        assert not link.send_at_once("while another thread sends")
    other.close()
    assert link.send_at_once("to nobody")


class Served:
    """A real engine and its scheduler, a hub, and a front's scheduler over a pipe."""

    def __init__(self, directory: Path, *, awake: bool) -> None:
        board = Board(multiprocessing.get_context("spawn"), 1)
        config = EngineConfig(
            model_path=SHOP,
            sid_vocab_file=SHOP / "items.tsv",
            device="cpu",
            kv_pool_tokens=4096,
            invariance_check=False,
        )
        self.scheduler = Scheduler(Engine(config))
        self.hub = Hub(self.scheduler, board, directory, awake=awake)
        self.desk, self.front, self.lost = connect(self.hub, board)
        self.scheduler.start()

    def close(self) -> None:
        self.scheduler.drain(0.0)
        self.hub.close()
        self.scheduler.close()
        self.scheduler.engine.close()

    def ask(self, number: int) -> Any:
        return self.front.submit_all([Request(input_ids=(*range(80), number), n=4, rid=f"r{number}")])[0]


@pytest.fixture(params=[True, False], ids=["awake", "asleep"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path, awake=request.param)
    yield served
    served.close()


def spied(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: Callable[[tuple[Any, ...]], str]) -> list[str]:
    """The threads that call a method, with what ``at`` makes of its arguments."""
    real, seen = getattr(owner, name), []

    def spy(*arguments: Any) -> Any:
        seen.append(f"{threading.current_thread().name.removeprefix('flashrec-')} {at(arguments)}")
        return real(*arguments)

    monkeypatch.setattr(owner, name, spy)
    return seen


@pytest.mark.usefixtures("patient")
def test_lone_requests_never_leave_the_engine_s_thread(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one finds it asleep; those that follow are heard, searched and answered on one thread, where it may."""
    heard = spied(monkeypatch, Desk, "_submit", lambda arguments: arguments[1].requests[0].rid[:2])
    told = spied(monkeypatch, Link, "send", lambda arguments: type(arguments[1]).__name__)
    listening = set[int]()
    hear = served.hub.ear._hear

    def hearing(timeout: float | None) -> None:
        if timeout == 0.0:
            listening.add(len(heard))
        hear(timeout)

    monkeypatch.setattr(served.hub.ear, "_hear", hearing)
    for number in range(4):
        assert len(served.ask(number).result(20).beams) == 4
        if served.hub._awake:
            wait_until(lambda after=number + 1: len(listening) == after)
    answered = [one for one in told if one.endswith(" Answer")]
    if served.hub._awake:
        assert heard == ["hear r0", "engine r1", "engine r2", "engine r3"]
        assert answered == [], "each was sent at once"
    else:
        assert heard == ["hear r0", "hear r1", "hear r2", "hear r3"]
        assert answered == ["tell Answer"] * 4


@pytest.mark.usefixtures("patient")
def test_whatever_comes_while_the_engine_listens_is_done(served: Served) -> None:
    """Operations, requests by the dozen, cancellations and the end of a front."""
    alone = [tuple(beam.token_ids for beam in served.ask(number).result(20).beams) for number in range(12)]
    assert served.front.flush_cache() > 0
    many = [served.ask(number) for number in range(12)]
    assert [tuple(beam.token_ids for beam in one.result(20).beams) for one in many] == alone
    served.ask(1).result(20)
    served.front.cancel("r1")
    assert served.front.engine.stats()["waves"] >= 14
    served.ask(2).result(20)
    served.desk.close()
    wait_until(lambda: bool(served.lost))


@pytest.mark.usefixtures("patient")
def test_an_engine_that_fails_gives_the_ear_back(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where it leaves only when a wave is launched: this one never is."""
    monkeypatch.setattr(Engine, "waves_in_flight", 2)
    served.ask(0).result(20)

    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(served.scheduler.engine, "launch", fail)
    with pytest.raises(EngineFault, match="planted"):
        served.ask(1).result(20)
    with pytest.raises(EngineFault, match="planted"):
        served.ask(2).result(20)  # refused by the hub's own thread: the engine's has ended


@pytest.mark.usefixtures("patient")
def test_an_answer_that_cannot_be_sent_ends_the_front(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its client would wait for ever; a fresh front takes over, and whoever waited is told."""
    served.ask(0).result(20)

    def fail(*_: object) -> None:
        raise TypeError("planted")

    monkeypatch.setattr("flashrec.front.desk.pack", fail)
    with pytest.raises(EngineFault, match="has gone"):
        served.ask(1).result(20)
    assert "can no longer be served" in caplog.text
    assert served.desk.gone


@pytest.mark.usefixtures("patient")
def test_nothing_waits_for_a_front_that_goes_while_catalogs_are_written(served: Served) -> None:
    ours, theirs = multiprocessing.Pipe()
    going = served.hub.attach(Link(ours))
    served.ask(0).result(20)
    with served.hub._publishing:
        theirs.close()
        for number in range(1, 4):
            assert len(served.ask(number).result(20).beams) == 4
        assert going in served.hub._desks
    wait_until(lambda: going not in served.hub._desks)


@pytest.mark.usefixtures("patient")
def test_a_trace_is_not_of_an_engine_that_listens(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.front.start_profile(ProfileOptions(output_dir=tmp_path, activities=("CPU",)))
    heard = spied(monkeypatch, Desk, "_submit", lambda arguments: arguments[1].requests[0].rid[:2])
    for number in range(3):
        served.ask(number).result(20)
        time.sleep(0.02)
    served.front.stop_profile()
    assert heard == ["hear r0", "hear r1", "hear r2"]


def test_the_answer_is_not_kept_from_a_front_that_does_not_read(tmp_path: Path) -> None:
    """Its pipe is full: the engine's thread leaves the answer to the desk's, and serves others meanwhile."""
    served = Served(tmp_path, awake=True)
    ours, theirs = multiprocessing.Pipe()
    deaf = served.hub.attach(Link(ours))
    try:
        link = Link(theirs)
        link.receive()
        deaf.send(b"x" * (1 << 20))  # fills the pipe, and holds the thread that tells
        time.sleep(0.2)
        link.send(Submit([Request(input_ids=(1, 2), n=4, rid="deaf")], None))
        wait_until(lambda: served.scheduler.engine.stats()["waves"] >= 1)
        assert len(served.ask(5).result(20).beams) == 4
        assert link.receive() == (b"x" * (1 << 20),)
        (answer,) = link.receive()
        assert answer.rid == "deaf"
    finally:
        served.close()


def test_nothing_is_left_open(tmp_path: Path) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        ear = Ear()
        ear.listen(lambda: True)
        ear.leave()
        ear.close()
    assert len(os.listdir("/proc/self/fd")) <= before
