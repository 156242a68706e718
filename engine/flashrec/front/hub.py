"""The engine's side of the pipes: what the fronts ask goes to the scheduler, and what it answers goes back."""

from __future__ import annotations

import functools
import itertools
import logging
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from flashrec.errors import FlashRecError
from flashrec.front.board import Board
from flashrec.front.desk import Desk
from flashrec.front.ear import Ear
from flashrec.front.link import Link
from flashrec.front.stored import store
from flashrec.front.wire import Call, Hello, Reply, Serve, StoredCatalog, StoredPlace, sendable
from flashrec.runtime.catalogs import ServedCatalog
from flashrec.runtime.scheduler import Scheduler

logger = logging.getLogger(__name__)

_CALLS_AT_ONCE = 16
_TAKE_TIMEOUT_S = 30.0
"""How long a front may take to put other catalogs into force before it is given up."""
_SPANS_TIMEOUT_S = 2.0
"""How long a trace waits for a front's spans."""


class Hub:
    """One scheduler for several fronts. ``directory`` is for the catalogs' files.

    ``awake``: the engine's thread sends a lone request's answer itself, and then listens for the next request.
    """

    def __init__(self, scheduler: Scheduler, board: Board, directory: Path, *, awake: bool = False) -> None:
        self.scheduler = scheduler
        self.ear = Ear()
        self._board = board
        self._directory = directory
        self._desks: list[Desk] = []
        self._stored: dict[int, StoredCatalog] = {}
        self._numbers = itertools.count()
        self._publishing = threading.Lock()
        self._changing = threading.Lock()
        self._posting = threading.Lock()
        self._calls = ThreadPoolExecutor(_CALLS_AT_ONCE, thread_name_prefix="flashrec-call")
        self._awake = awake
        scheduler.on_change = self.post
        if awake:
            scheduler.on_idle, scheduler.on_busy = self._listen, self.ear.leave
        scheduler.engine.catalogs.on_read = self._keep
        scheduler.engine.profiler.collect = self._collect_spans

    @property
    def attentive(self) -> bool:
        """Whether the engine's thread may spend its time on the fronts: nobody waits for it."""
        return self._awake and self.scheduler.lone

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

    def _listen(self, until: Callable[[], bool]) -> None:
        """On the engine's thread; not into a trace, which would be of nothing else."""
        if self.scheduler.engine.profiler.state != "recording":
            self.ear.listen(until)

    def close(self) -> None:
        for desk in list(self._desks):
            self.detach(desk)
        self.ear.close()
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

    def _collect_spans(self) -> None:
        """Wait for what serving fronts have to say: their spans come in front of their answer to any publication."""
        with self._publishing:
            desks = [desk for desk in self._desks if desk.ready.done()]
            number = self._publish(desks)
        for desk in desks:
            desk.taken(number, _SPANS_TIMEOUT_S)

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
