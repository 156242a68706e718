"""The scheduler as a front sees it: the same calls, answered by the engine's process."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashrec.config import EngineConfig
from flashrec.errors import CatalogStateError, EngineFault
from flashrec.front.board import Board
from flashrec.front.link import Link, LinkClosed
from flashrec.front.stored import load
from flashrec.front.wire import (
    Answer,
    Call,
    Cancel,
    FoundSids,
    Hello,
    LetGo,
    PackedResult,
    Reply,
    Serve,
    StoredCatalog,
    StoredPlace,
    Submit,
    Taken,
)
from flashrec.profiler import ProfileOptions
from flashrec.request import Beam, Request, Result
from flashrec.runtime.catalogs import CatalogNames, Place, ServedCatalog
from flashrec.runtime.results import WaveBeams
from flashrec.sid.catalog import Catalog
from flashrec.sid.layout import SidLayout
from flashrec.torch_trace import Span

_SPANS_TOGETHER_S = 0.25


class RemoteCatalogs(CatalogNames):
    """The engine's catalogs, as it last told them; their host arrays are mapped, nothing is copied.

    ``let_go`` is called when nothing here holds a revision any more: on any thread, in the middle of anything.
    """

    def __init__(self, layout: SidLayout | None, let_go: Callable[[int], None]) -> None:
        super().__init__(layout)
        self._let_go = let_go

    def take(self, places: dict[str, StoredPlace]) -> None:
        """From now on the names stand for these."""
        self._places = {
            name: Place(self._mapped(place.active), None if place.standby is None else self._mapped(place.standby))
            for name, place in places.items()
        }

    def _mapped(self, stored: StoredCatalog) -> ServedCatalog:
        known = self._living.get(stored.revision)
        if known is None:
            assert self.layout is not None
            known = self._living[stored.revision] = load(stored, self.layout)
            weakref.finalize(known, self._let_go, stored.revision).atexit = False
        return known


class RemoteEngine:
    """What the server reads of the engine; see :class:`flashrec.server.backend.Engine`."""

    def __init__(self, hello: Hello, tokenizer: Any, call: Callable[..., Any], let_go: Callable[[int], None]) -> None:
        self.config: EngineConfig = hello.engine_config
        self.layout: SidLayout | None = hello.layout
        self.tokenizer = tokenizer
        self.catalogs = RemoteCatalogs(hello.layout, let_go)
        self._call = call

    @property
    def catalog(self) -> Catalog | None:
        served = self.catalogs.find(None)
        return None if served is None else served.catalog

    @property
    def profiler(self) -> RemoteEngine:
        return self

    def status(self) -> dict[str, object]:
        """The profiler's."""
        status: dict[str, object] = self._call("profiler_status")
        return status

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = self._call("stats")
        return stats


class RemoteScheduler:
    """See :class:`flashrec.server.backend.Scheduler`.

    What is wrong with a request comes back through its future. ``lost`` is called, on the receiving thread, when the
    engine's process has gone, or is not understood.
    """

    def __init__(self, link: Link, hello: Hello, tokenizer: Any, board: Board) -> None:
        # Told by a thread of their own: whoever lets go of a revision may be in the middle of sending something else.
        self._news: queue.SimpleQueue[Taken | LetGo | Span | None] = queue.SimpleQueue()
        self.engine = RemoteEngine(hello, tokenizer, self._call, lambda revision: self._news.put(LetGo(revision)))
        self.lost: Callable[[EngineFault], None] = lambda fault: None
        self._link = link
        self._board = board
        self._numbers = itertools.count()
        self._calls: dict[int, Future[Any]] = {}
        self._pending: dict[str, tuple[Request, ServedCatalog | None, Future[Result]]] = {}
        self._lock = threading.Lock()
        self._state = threading.Condition(self._lock)
        self._fault: EngineFault | None = None
        self._stopping = False
        threading.Thread(target=self._tell, name="flashrec-tell", daemon=True).start()

    @property
    def queue_depth(self) -> int:
        return self._board.queue_depth

    @property
    def rows_in_flight(self) -> int:
        return self._board.rows_in_flight

    def submit_all(self, requests: Sequence[Request], deadline: float | None = None) -> list[Future[Result]]:
        named = [self._named(request) for request in requests]
        futures: list[Future[Result]] = [Future() for _ in named]
        with self._lock:
            if self._fault is not None:
                raise self._fault
            if self._stopping:
                raise EngineFault("the engine is shutting down")
            for (request, served), future in zip(named, futures, strict=True):
                self._pending[request.rid] = request, served, future
        self._send(Submit([request for request, _ in named], deadline))
        return futures

    def cancel(self, rid: str) -> None:
        with self._lock:
            pending = self._pending.pop(rid, None)
            self._state.notify_all()
        if pending is not None:
            pending[2].cancel()
            self._send(Cancel(rid))

    def flush_cache(self) -> int:
        return int(self._call("flush_cache"))

    def load_catalog(self, name: str, path: Path, *, activate: bool = True) -> Place:
        self._call("load_catalog", name=name, path=path, activate=activate)
        return self._place(name)

    def rollback_catalog(self, name: str) -> Place:
        self._call("rollback_catalog", name=name)
        return self._place(name)

    def drop_catalog(self, name: str) -> None:
        self._call("drop_catalog", name=name)

    def start_profile(self, options: ProfileOptions) -> None:
        self._call("start_profile", options=options)

    def stop_profile(self) -> None:
        self._call("stop_profile")

    @property
    def recording(self) -> bool:
        """Whether the engine's process records a trace, which wants this one's spans: see :meth:`show`."""
        return self._board.recording

    def show(self, span: Span) -> None:
        self._news.put(span)

    def drain(self, timeout: float) -> bool:
        """Refuse new requests and wait for those of this process; False when some are left."""
        with self._lock:
            self._stopping = True
            return self._state.wait_for(lambda: not self._pending, timeout)

    def close(self) -> None:
        """Whoever still waits gets :class:`EngineFault`. The link stays until the process ends."""
        self._end(EngineFault("the engine is shutting down"))

    def hear(self, message: Answer | Reply | Serve) -> None:
        """Act on a message of the engine's process. One thread does."""
        match message:
            case Answer():
                self._answer(message)
            case Reply():
                future = self._calls.pop(message.number, None)
                if future is None:
                    return  # whoever called has been told that the engine is shutting down
                if message.error is None:
                    future.set_result(message.value)
                else:
                    future.set_exception(message.error)
            case Serve():
                self.engine.catalogs.take(message.places)
                self._news.put(Taken(message.number))  # behind what went with the places before

    def lose(self, fault: EngineFault) -> None:
        """The engine's process has gone, or is not understood: whoever waits gets ``fault``."""
        self._end(fault)
        self._news.put(None)
        self.lost(fault)

    def _place(self, name: str) -> Place:
        place = self.engine.catalogs.places().get(name)
        if place is None:
            raise CatalogStateError(f"catalog {name!r} has been dropped meanwhile")
        return place

    def _named(self, request: Request) -> tuple[Request, ServedCatalog | None]:
        """The request, asking for the very revision that its beams will be read from here."""
        if request.constrained is False:
            return request, None
        served = self.engine.catalogs.find(request.catalog)
        if served is None or request.catalog == served.label:
            return request, served
        return replace(request, catalog=served.label), served

    def _answer(self, answer: Answer) -> None:
        with self._lock:
            pending = self._pending.get(answer.rid)
        if pending is None:
            return
        request, served, future = pending
        outcome = answer.outcome
        # Still pending: should this fail, the request ends with the others.
        found = unpack(outcome, request, served) if isinstance(outcome, PackedResult) else outcome
        with self._lock:
            if self._pending.pop(answer.rid, None) is None:
                return
            self._state.notify_all()
        if not future.set_running_or_notify_cancel():
            return
        if isinstance(found, Result):
            future.set_result(found)
        else:
            future.set_exception(found)

    def _call(self, operation: str, **arguments: Any) -> Any:
        """Run an operation over there and wait for it; never on the event loop."""
        number, future = next(self._numbers), Future[Any]()
        with self._lock:
            if self._fault is not None:
                raise self._fault
            self._calls[number] = future
        self._send(Call(number, operation, arguments))
        return future.result()

    def _tell(self) -> None:
        """Send the news; spans together, since each message costs the engine's thread the interpreter for a while."""
        while (first := self._news.get()) is not None:
            news: list[Any] = [first]
            patience = time.monotonic() + _SPANS_TOGETHER_S
            while isinstance(news[-1], Span) and (left := patience - time.monotonic()) > 0:
                with contextlib.suppress(queue.Empty):
                    news.append(self._news.get(timeout=left))
            if news[-1] is None:
                return
            self._send(*news)

    def _send(self, *messages: Submit | Cancel | Call | Taken | LetGo | Span) -> None:
        with contextlib.suppress(LinkClosed):  # the receiving thread finds out as well, and ends whatever waits
            self._link.send(*messages)

    def _end(self, fault: EngineFault) -> None:
        with self._lock:
            self._fault = self._fault or fault
            waiting = [future for _, _, future in self._pending.values()]
            calls = list(self._calls.values())
            self._pending.clear()
            self._calls.clear()
            self._state.notify_all()
        for future in (*waiting, *calls):
            if future.set_running_or_notify_cancel():
                future.set_exception(fault)


def unpack(packed: PackedResult, request: Request, served: ServedCatalog | None) -> Result:
    """The result that :func:`flashrec.front.wire.pack` was given; its beams are made when they are looked at."""
    beams: Sequence[Beam]
    if isinstance(packed.beams, FoundSids):
        assert served is not None
        ranks, totals = packed.beams.arrays()
        beams = WaveBeams([request], [len(ranks)], ranks, totals, served.catalog, served.layout).lazy(0)
    else:
        beams = packed.beams
    return Result(request.rid, beams, packed.prompt_tokens, packed.cached_tokens, packed.score_space, packed.catalog)
