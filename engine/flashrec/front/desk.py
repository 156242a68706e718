"""One front as the engine's process sees it: it hears what the front asks, and tells it what comes of it."""

from __future__ import annotations

import functools
import logging
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

from flashrec.errors import EngineFault, FlashRecError
from flashrec.front.link import Link, LinkClosed
from flashrec.front.wire import (
    Answer,
    Call,
    Cancel,
    LetGo,
    Ready,
    Serve,
    Submit,
    Taken,
    pack,
    sendable,
)
from flashrec.request import Result
from flashrec.runtime.catalogs import ServedCatalog
from flashrec.torch_trace import Span

if TYPE_CHECKING:
    from flashrec.front.hub import Hub

logger = logging.getLogger(__name__)


class _Ended(NamedTuple):
    """A request of the front that has ended."""

    rid: str
    future: Future[Result]


class Desk:
    """One front: the hub's ear hears it, and a thread of its own tells it, so that nobody waits until it reads."""

    def __init__(self, hub: Hub, link: Link) -> None:
        self.ready: Future[None] = Future()
        self._hub = hub
        self._link = link
        self._outbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._held: set[str] = set()
        self._lent: dict[int, ServedCatalog] = {}
        self._lock = threading.Lock()
        self._state = threading.Condition(self._lock)
        self._taken = -1
        self._gone = False

    @property
    def gone(self) -> bool:
        """Whether the front has hung up, or been given up."""
        return self._gone

    def start(self) -> None:
        threading.Thread(target=self._tell, name="flashrec-tell", daemon=True).start()
        self._hub.ear.add(self._link, self._act, self.close)

    def send(self, message: object) -> None:
        self._outbox.put(message)

    def serve(self, message: Serve, revisions: Sequence[ServedCatalog]) -> None:
        """Send the catalogs, and hold their revisions for as long as the front does: what it has read asks for them."""
        with self._lock:
            if not self._gone:
                self._lent |= {served.revision: served for served in revisions}
        self.send(message)

    def taken(self, number: int, timeout: float) -> bool:
        """Whether the front has put :class:`Serve` ``number`` into force, or has gone, within ``timeout`` seconds."""
        with self._lock:
            return self._state.wait_for(lambda: self._gone or self._taken >= number, timeout)

    def close(self) -> None:
        """Hang up, and cancel what the front was waiting for."""
        with self._lock:
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
                with self._lock:
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
        with self._lock:
            if self._gone:
                return
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
            if not self._hub.attentive:  # or the engine's thread takes them at once, and says so itself
                self._hub.post()
        for rid, future in zip(rids, futures, strict=True):
            future.add_done_callback(functools.partial(self._done, rid))

    def _done(self, rid: str, future: Future[Result]) -> None:
        """On the engine's thread, which sends the answer itself if it has nothing else to do."""
        self._answered(rid)
        if not (future.cancelled() or self._tell_at_once(rid, future)):
            self._outbox.put(_Ended(rid, future))

    def _tell_at_once(self, rid: str, future: Future[Result]) -> bool:
        if not (self._hub.attentive and self._outbox.empty()):
            return False
        try:
            return self._link.send_at_once(_message(_Ended(rid, future)))
        except Exception:  # what cannot be packed ends the front, and its own thread says so
            return False

    def _answered(self, rid: str) -> None:
        with self._lock:
            self._held.discard(rid)

    def _tell(self) -> None:
        """Send what has come up, all of it at once, until the front has gone."""
        try:
            while True:
                waiting = [self._outbox.get()]
                while not self._outbox.empty():
                    waiting.append(self._outbox.get())
                if None in waiting:
                    break
                self._link.send(*map(_message, waiting))
        except LinkClosed:
            pass
        except Exception:
            logger.exception("a front process can no longer be served")
        finally:
            self._hub.detach(self)


def _message(waiting: object) -> object:
    if not isinstance(waiting, _Ended):
        return waiting
    rid, future = waiting
    error = future.exception()
    return Answer(rid, pack(future.result()) if error is None else sendable(error))
