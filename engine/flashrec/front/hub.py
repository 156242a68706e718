"""The engine's side of the pipes: what the fronts ask goes to the scheduler, and what it answers goes back."""

from __future__ import annotations

import functools
import itertools
import logging
import queue
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from flashrec.errors import EngineFault, FlashRecError
from flashrec.front.board import Board
from flashrec.front.stored import store
from flashrec.front.wire import (
    Answer,
    Call,
    Cancel,
    Hello,
    LetGo,
    Link,
    LinkClosed,
    Ready,
    Reply,
    Serve,
    StoredCatalog,
    StoredPlace,
    Submit,
    Taken,
    pack,
    sendable,
)
from flashrec.request import Result
from flashrec.runtime.catalogs import ServedCatalog
from flashrec.runtime.scheduler import Scheduler
from flashrec.torch_trace import Span

logger = logging.getLogger(__name__)

_CALLS_AT_ONCE = 16
_TAKE_TIMEOUT_S = 30.0
"""How long a front may take to put other catalogs into force before it is given up."""


class Hub:
    """One scheduler for several fronts. ``directory`` is for the catalogs' files."""

    def __init__(self, scheduler: Scheduler, board: Board, directory: Path) -> None:
        self.scheduler = scheduler
        self._board = board
        self._directory = directory
        self._desks: list[Desk] = []
        self._stored: dict[int, StoredCatalog] = {}
        self._numbers = itertools.count()
        self._publishing = threading.Lock()
        self._changing = threading.Lock()
        self._posting = threading.Lock()
        self._calls = ThreadPoolExecutor(_CALLS_AT_ONCE, thread_name_prefix="flashrec-call")
        scheduler.on_change = self.post
        scheduler.engine.catalogs.on_read = self._keep

    def attach(self, link: Link) -> Desk:
        """Tell a new front what it needs to know, and serve it from now on."""
        engine = self.scheduler.engine
        with self._publishing:
            desk = Desk(self, link)
            desk.send(Hello(engine.config, engine.layout))
            self._publish([desk])
            self._desks.append(desk)
        desk.start()  # what has been sent before goes out together
        return desk

    def detach(self, desk: Desk) -> None:
        """A front has gone: nobody waits for its requests any more."""
        desk.close()
        with self._publishing:
            if desk in self._desks:
                self._desks.remove(desk)

    def post(self) -> None:
        """Tell the fronts how things stand."""
        scheduler = self.scheduler
        with self._posting:  # read inside the lock: whoever writes last has read last
            recording = scheduler.engine.profiler.state == "recording"
            self._board.post(scheduler.queue_depth, scheduler.rows_in_flight, recording=recording)

    def close(self) -> None:
        for desk in list(self._desks):
            self.detach(desk)
        self._calls.shutdown(wait=False, cancel_futures=True)

    def run(self, call: Call, reply: Callable[[Reply], None]) -> None:
        """Run an operation on a thread of its own: some wait for a wave, or read a catalog."""
        self._calls.submit(lambda: reply(self._outcome(call)))

    def _outcome(self, call: Call) -> Reply:
        try:
            return Reply(call.number, value=self._operations()[call.operation](**call.arguments))
        except Exception as error:
            if not isinstance(error, FlashRecError):
                logger.exception("%s failed", call.operation)
            return Reply(call.number, error=sendable(error))
        finally:
            self.post()

    def _operations(self) -> dict[str, Callable[..., Any]]:
        scheduler = self.scheduler
        return {
            "stats": scheduler.engine.stats,
            "profiler_status": scheduler.engine.profiler.status,
            "flush_cache": scheduler.flush_cache,
            "start_profile": scheduler.start_profile,
            "stop_profile": scheduler.stop_profile,
            "load_catalog": functools.partial(self._change, scheduler.load_catalog),
            "rollback_catalog": functools.partial(self._change, scheduler.rollback_catalog),
            "drop_catalog": functools.partial(self._change, scheduler.drop_catalog),
        }

    def _change(self, change: Callable[..., object], **arguments: Any) -> None:
        """Change the catalogs; whoever asks a front after this has returned is answered from the new ones."""
        change(**arguments)
        with self._changing:
            with self._publishing:
                number, desks = self._publish(self._desks), list(self._desks)
            for desk in desks:
                if not desk.taken(number, _TAKE_TIMEOUT_S):
                    logger.error("a front process did not take the catalogs over in %g s: given up", _TAKE_TIMEOUT_S)
                    desk.close()
            with self._publishing:
                self._forget()

    def _publish(self, desks: Sequence[Desk]) -> int:
        """Tell fronts what the names stand for now; returns the number of the message."""
        number, places = next(self._numbers), self.scheduler.engine.catalogs.places()
        stored = {name: StoredPlace(*map(self._store, place.revisions)) for name, place in places.items()}
        for desk in desks:
            desk.serve(Serve(number, stored), [one for place in places.values() for one in place.revisions])
        return number

    def _keep(self, served: ServedCatalog) -> None:
        """Write a new revision's files before it can go into service: without them no front could answer from it.

        Raises :class:`CatalogStateError`.
        """
        with self._publishing:
            self._store(served)

    def _store(self, served: ServedCatalog) -> StoredCatalog:
        if served.revision not in self._stored:
            self._stored[served.revision] = store(served, self._directory / f"catalog-{served.revision}")
        return self._stored[served.revision]

    def _forget(self) -> None:
        """Delete the files of what no name stands for; a front that still answers from it has them mapped."""
        kept = {one.revision for place in self.scheduler.engine.catalogs.places().values() for one in place.revisions}
        newest = max(kept, default=0)  # what is newer has been written, and is about to go into service
        for revision in [number for number in self._stored if number not in kept and number < newest]:
            shutil.rmtree(self._stored.pop(revision).directory, ignore_errors=True)


class Desk:
    """One front: a thread that hears it and one that tells it, so that neither waits for the other."""

    def __init__(self, hub: Hub, link: Link) -> None:
        self.ready: Future[None] = Future()
        self._hub = hub
        self._link = link
        self._outbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._held: set[str] = set()
        self._lent: dict[int, ServedCatalog] = {}
        self._state = threading.Condition()
        self._taken = -1
        self._gone = False

    @property
    def gone(self) -> bool:
        """Whether the front has hung up, or been given up."""
        return self._gone

    def start(self) -> None:
        for name, loop in (("hear", self._hear), ("tell", self._tell)):
            threading.Thread(target=self._until_gone, args=(loop,), name=f"flashrec-{name}", daemon=True).start()

    def send(self, message: object) -> None:
        self._outbox.put(message)

    def serve(self, message: Serve, revisions: Sequence[ServedCatalog]) -> None:
        """Send the catalogs, and hold their revisions for as long as the front does: what it has read asks for them."""
        with self._state:
            if not self._gone:
                self._lent |= {served.revision: served for served in revisions}
        self.send(message)

    def taken(self, number: int, timeout: float) -> bool:
        """Whether the front has put :class:`Serve` ``number`` into force, or has gone, within ``timeout`` seconds."""
        with self._state:
            return self._state.wait_for(lambda: self._gone or self._taken >= number, timeout)

    def close(self) -> None:
        """Hang up, and cancel what the front was waiting for."""
        with self._state:
            if self._gone:
                return
            self._gone = True
            held, self._held = self._held, set()
            self._lent.clear()
            self._state.notify_all()
        self._outbox.put(None)
        self._link.close()
        for rid in held:
            self._hub.scheduler.cancel(rid)
        if not self.ready.done():
            self.ready.set_exception(EngineFault("a front process ended before it could serve"))

    def _until_gone(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except LinkClosed:
            pass
        except Exception:
            logger.exception("a front process can no longer be served")
        self._hub.detach(self)

    def _hear(self) -> None:
        while True:
            for message in self._link.receive():
                self._act(message)

    def _act(self, message: Submit | Cancel | Call | Taken | LetGo | Ready | Span) -> None:
        match message:
            case Span():
                self._hub.scheduler.engine.profiler.add(message)
            case Submit():
                self._submit(message)
            case Cancel():
                self._hub.scheduler.cancel(message.rid)
            case Call():
                self._hub.run(message, self.send)
            case Taken():
                with self._state:
                    self._taken = max(self._taken, message.number)
                    self._state.notify_all()
            case LetGo():
                self._lent.pop(message.revision, None)
            case Ready():
                if message.error is None:
                    self.ready.set_result(None)
                else:
                    logger.error("a front process cannot serve: %s", message.error)
                    self.ready.set_exception(message.error)

    def _submit(self, message: Submit) -> None:
        rids = [request.rid for request in message.requests]
        with self._state:
            self._held.update(rids)
        try:
            futures = self._hub.scheduler.submit_all(message.requests, message.deadline)
        except Exception as error:
            if not isinstance(error, FlashRecError):
                logger.exception("a request could not be queued")
            for rid in rids:
                self._answered(rid)
                self.send(Answer(rid, sendable(error)))
            return
        finally:
            self._hub.post()
        for rid, future in zip(rids, futures, strict=True):
            future.add_done_callback(functools.partial(self._done, rid))

    def _done(self, rid: str, future: Future[Result]) -> None:
        """On the engine's thread, which has better things to do: see :meth:`_tell`."""
        self._answered(rid)
        if not future.cancelled():
            self._outbox.put((rid, future))

    def _answered(self, rid: str) -> None:
        with self._state:
            self._held.discard(rid)

    def _tell(self) -> None:
        """Send what has come up, all of it at once."""
        while True:
            waiting = [self._outbox.get()]
            while not self._outbox.empty():
                waiting.append(self._outbox.get())
            if None in waiting:
                return
            self._link.send(*map(_message, waiting))


def _message(waiting: object) -> object:
    if not isinstance(waiting, tuple):
        return waiting
    rid, future = waiting
    error = future.exception()
    return Answer(rid, pack(future.result()) if error is None else sendable(error))
