"""The engine thread: a bounded queue in front of it, waves out of it."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from flashrec.errors import CaptureError, DeadlineError, EngineFault, QueueFullError
from flashrec.profiler import ProfileOptions, trace_range
from flashrec.request import Request, Result
from flashrec.runtime.catalogs import Place
from flashrec.runtime.engine import Engine
from flashrec.runtime.flight import Flight
from flashrec.runtime.ticket import Ticket, members_of

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Scheduler:
    """Runs an engine on a thread of its own.

    All methods may be called from any thread. Waves are formed by :class:`~flashrec.runtime.admission.Admission` from
    what waits when the engine is free, so a wave never waits for company; cancelled and expired requests are dropped
    before they take a row. On a GPU the next wave is launched while one decodes, which hides its host work. Calls that
    may not run beside a wave take turns with waves.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._waiting: list[Ticket] = []
        self._running: list[Ticket] = []
        self._flights: deque[tuple[list[Ticket], Flight]] = deque()
        self._calls: list[Callable[[], None]] = []
        self._called = False
        self._state = threading.Condition()
        self._stopping = False
        self._fault: EngineFault | None = None
        self.on_change: Callable[[], None] = lambda: None
        """Called on the engine thread when requests may have left the queue, or a wave has ended."""
        self.on_idle: Callable[[Callable[[], bool]], None] = lambda until: None
        """Called on the engine thread before it sleeps after a lone request; returns when ``until()``, or earlier."""
        self.on_busy: Callable[[], None] = lambda: None
        """Called on the engine thread when it is not idle any more, at the latest when it has launched a wave."""
        self.lone = False
        """Whether a wave of one request has just ended, and nothing else is here."""
        self._thread = threading.Thread(target=self._loop, name="flashrec-engine", daemon=True)

    @property
    def queue_depth(self) -> int:
        """Requests that wait for a wave."""
        return len(self._waiting)

    @property
    def fault(self) -> EngineFault | None:
        """What ended the engine, if something has."""
        return self._fault

    @property
    def rows_in_flight(self) -> int:
        """Beams of the waves that were admitted and have not ended."""
        return sum(ticket.member.width for ticket in self._running)

    def start(self) -> None:
        """Start the engine thread. What lives by now lives on: the collector need not scan it while beams are made."""
        gc.collect()
        gc.freeze()
        self._thread.start()

    def submit(self, request: Request, deadline: float | None = None) -> Future[Result]:
        """Queue a request; cancelling the future before its wave starts drops it.

        Raises:
            RequestError: the request is invalid.
            QueueFullError: ``queue_size`` requests wait already.
            EngineFault: the engine has failed or is shut down.
        """
        (future,) = self.submit_all([request], deadline)
        return future

    def submit_all(self, requests: Sequence[Request], deadline: float | None = None) -> list[Future[Result]]:
        """Queue all requests, or none. See :meth:`submit`; of several, an error's field names the place in the list."""
        tickets = [Ticket(member, Future(), deadline) for member in members_of(requests, self.engine.prepare)]
        for ticket in tickets:
            self.engine.admission.enqueue(ticket.member, time.monotonic())
        with self._state:
            if self._fault is not None:
                raise self._fault
            if self._stopping:
                raise EngineFault("the engine is shutting down")
            if len(self._waiting) + len(tickets) > self.engine.config.queue_size:
                raise QueueFullError(f"{len(self._waiting)} requests wait already (queue_size); try again later")
            self._waiting += tickets
            self._state.notify_all()
        return [ticket.future for ticket in tickets]

    def cancel(self, rid: str) -> None:
        """Drop a waiting request by its id; one whose wave runs is answered to nobody."""
        with self._state:
            for ticket in (*self._waiting, *self._running):
                if ticket.member.request.rid == rid:
                    ticket.future.cancel()

    def flush_cache(self) -> int:
        """Forget cached prefixes between two waves; returns the pages freed."""
        return self._on_engine_thread(self.engine.flush_cache)

    def load_catalog(self, name: str, path: Path, *, activate: bool = True) -> Place:
        """Read a catalog on the caller's thread; see :meth:`flashrec.runtime.engine.Engine.load_catalog`."""
        return self.engine.load_catalog(name, path, activate=activate, turn=self._on_engine_thread)

    def rollback_catalog(self, name: str) -> Place:
        """See :meth:`flashrec.runtime.engine.Engine.rollback_catalog`."""
        return self.engine.rollback_catalog(name, turn=self._on_engine_thread)

    def drop_catalog(self, name: str) -> None:
        """See :meth:`flashrec.runtime.engine.Engine.drop_catalog`."""
        self.engine.drop_catalog(name, turn=self._on_engine_thread)

    def start_profile(self, options: ProfileOptions) -> None:
        """Start a trace between two waves; see :meth:`flashrec.profiler.Profiler.start`."""
        self._on_engine_thread(lambda: self.engine.profiler.start(options))

    def stop_profile(self) -> None:
        """End a trace between two waves."""
        self._on_engine_thread(self.engine.profiler.stop)

    def drain(self, timeout: float) -> bool:
        """Refuse new requests and wait for those in hand; False when some are left after ``timeout`` seconds."""
        with self._state:
            self._stopping = True
            self._state.notify_all()
            return self._state.wait_for(lambda: not self._waiting and not self._running, timeout)

    def close(self) -> None:
        """Stop after the wave that runs; whatever still waits gets :class:`EngineFault`."""
        with self._state:
            self._stopping = True
            dropped, self._waiting = self._waiting, []
            self._state.notify_all()
        for ticket in dropped:
            ticket.fail(EngineFault("the engine is shutting down"))
        if self._thread.is_alive():
            self._thread.join()

    def _on_engine_thread(self, function: Callable[[], T]) -> T:
        # In a list that is emptied: frames of both threads are on an error's traceback, and a future that they held
        # would hold the error, a circle that keeps a refused catalog alive.
        answer: list[Future[T]] = [Future()]

        def call() -> None:
            try:
                answer[0].set_result(function())
            except Exception as error:
                answer[0].set_exception(error)

        with self._state:
            if self._fault is not None:
                raise self._fault
            self._calls.append(call)
            self._state.notify_all()
        try:
            return answer[0].result()
        finally:
            answer.clear()

    def _loop(self) -> None:
        try:
            while self._turn():
                pass
            self._fail_all(EngineFault("the engine is shut down"))
        except BaseException as error:
            logger.exception("the engine failed")
            self._fail_all(EngineFault(f"the engine failed: {type(error).__name__}: {error}"))
        finally:
            self.on_busy()

    def _turn(self) -> bool:
        """Wait for something to do and do it; False when the thread should end."""
        for _, flight in self._flights:
            # Whoever comes while it reads its prompts would wait behind it anyway: they share the next wave.
            with trace_range("flashrec.batch.wait"):
                flight.await_decode()
        if self.lone and not self._flights and not self._called_for():
            self.on_idle(self._called_for)
        self.lone = False
        with self._state:
            if not (self._flights or self._called_for()):
                with trace_range("flashrec.batch.wait"):
                    self._state.wait_for(self._called_for, self._patience())
            self._drop_stale()
            calls = self._due_calls()
            stop = self._stopping and not self._waiting
            wave = self._admit() if not calls else []
            if self._waiting and not (wave or calls or self._flights):
                raise EngineFault("no wave can be formed although none is in flight: pages have leaked")
        runs_at_once = self.engine.waves_in_flight == 1  # on a CPU a wave has run when it has been launched
        hurried = len(wave) == 1 and not (self._waiting or runs_at_once)  # its device has nothing to do until then
        if not hurried:
            self.on_change()
        if runs_at_once:
            self.on_busy()
        if wave:
            self._launch(wave)
        if hurried:
            self.on_change()
        self.on_busy()
        while self._flights and (calls or not wave or len(self._flights) == self.engine.waves_in_flight):
            self._land(*self._flights.popleft())
        for call in calls:
            self.lone = False  # who comes now waits for it
            call()
        return not stop or bool(calls) or bool(self._calls) or bool(self._flights)

    def _called_for(self) -> bool:
        return bool(self._waiting or self._calls or self._stopping)

    def _due_calls(self) -> list[Callable[[], None]]:
        """The calls to run now, before any wave; after a turn of calls, waves that wait come first."""
        self._called = bool(self._calls) and not (self._called and self._waiting)
        if not self._called:
            return []
        calls, self._calls = self._calls, []
        return calls

    def _patience(self) -> float | None:
        deadlines = [ticket.deadline for ticket in self._waiting if ticket.deadline is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _drop_stale(self) -> None:
        now, kept = time.monotonic(), []
        for ticket in self._waiting:
            if ticket.deadline is not None and ticket.deadline <= now:
                ticket.fail(DeadlineError("the deadline passed while the request waited for a wave"))
            elif not ticket.future.cancelled():
                kept.append(ticket)
        self._waiting = kept

    def _admit(self) -> list[Ticket]:
        if not self._waiting:
            return []
        by_member = {ticket.member: ticket for ticket in self._waiting}
        members = self.engine.admission.admit(list(by_member), time.monotonic(), len(self._running))
        wave = [by_member[member] for member in members]
        chosen = set(wave)
        self._running += wave
        self._waiting = [ticket for ticket in self._waiting if ticket not in chosen]
        return wave

    def _launch(self, wave: list[Ticket]) -> None:
        """A program that is captured at its first use may not find the memory for it: its wave fails, others go on."""
        try:
            self._flights.append((wave, self.engine.launch([ticket.member for ticket in wave])))
        except CaptureError as error:
            logger.exception("a wave of %d requests failed", len(wave))
            self._ended(wave)
            for ticket in wave:
                ticket.fail(error)

    def _land(self, wave: list[Ticket], flight: Flight) -> None:
        """Answer a wave's requests, and only then give back what it held: clients wait for their answers."""
        try:
            outcomes = self.engine.outcomes(flight)
            now = time.monotonic()
            self.lone = len(wave) == len(self._running) == 1 and not self._waiting
            for ticket, outcome in zip(wave, outcomes, strict=True):
                ticket.answer(outcome, now)
        finally:
            self.engine.release(flight)
        self._ended(wave)

    def _ended(self, wave: list[Ticket]) -> None:
        with self._state:
            self._running = [ticket for ticket in self._running if ticket not in wave]
            self._state.notify_all()
        self.on_change()

    def _fail_all(self, fault: EngineFault) -> None:
        with self._state:
            self._fault = fault
            tickets = (*self._running, *self._waiting)
            self._running, self._waiting = [], []
            calls, self._calls = self._calls, []
            self._state.notify_all()
        for ticket in tickets:
            ticket.fail(fault)
        for call in calls:
            call()
