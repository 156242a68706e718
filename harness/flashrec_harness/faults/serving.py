"""Faults of the server and of how it is loaded: what only minutes of traffic, or too much of it, can show."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray
from starlette.types import Message, Receive, Scope, Send

from flashrec.errors import DeadlineError
from flashrec.front.stored import load
from flashrec.front.wire import StoredCatalog
from flashrec.request import JsonColumn
from flashrec.runtime.admission import Admission
from flashrec.runtime.catalogs import Catalogs, Place, ServedCatalog
from flashrec.runtime.engine import Engine
from flashrec.runtime.member import Member
from flashrec.server import app, jobs
from flashrec.server.context import Context
from flashrec.server.errors import ApiError, as_api_error
from flashrec.server.lifecycle import Places
from flashrec.server.middleware import Gate
from flashrec.sid.catalog import Catalog
from flashrec.sid.layout import SidLayout
from flashrec_harness.faults.registry import fault, overload, soak
from flashrec_harness.outcome import Outcome

_LEAK_BYTES = 2 << 20
_COSTLY_S = 0.02
_EVERY = 10


@fault("lone-waves", soak("the load was mixed", Outcome.INVALID))
def lone_waves() -> Iterator[None]:
    """Every request gets a wave of its own, so that no request has company that could harm it."""
    real = Admission.admit

    def admit(self: Admission, waiting: Sequence[Member], now: float = 0.0, in_flight: int = 0) -> list[Member]:
        return real(self, waiting[:1], now)

    with mock.patch.object(Admission, "admit", admit):
        yield


@fault("reload-renames-items", soak("answers equal those given alone"))
def reload_renames_items() -> Iterator[None]:
    """From the second reload on, a semantic ID of the new catalog stands for the items of the one before it."""
    place = Catalogs.place
    items_of, items_of_all, items_json = Catalog.items_of, Catalog.items_of_all, Catalog.items_json
    wrong: list[Catalog] = []

    def placing(self: Catalogs, served: ServedCatalog, *, activate: bool = True) -> Place:
        found = place(self, served, activate=activate)
        # The suite's first reload comes before it asks anything, so that one must be right.
        if found.standby is not None and served.revision > 2:
            wrong.append(served.catalog)
        return found

    def loading(stored: StoredCatalog, layout: SidLayout) -> ServedCatalog:
        # Where a front renders the answers, from its own copy.
        found = load(stored, layout)
        if found.revision > 2:
            wrong.append(found.catalog)
        return found

    def moved(catalog: Catalog) -> int:
        return int(any(catalog is one for one in wrong))

    def one(self: Catalog, rank: int) -> tuple[str, ...]:
        return items_of(self, max(rank - moved(self), 0))

    def several(self: Catalog, ranks: NDArray[np.integer]) -> list[tuple[str, ...]]:
        return items_of_all(self, np.maximum(ranks - moved(self), 0))

    def written(self: Catalog, ranks: NDArray[np.integer]) -> JsonColumn:
        return items_json(self, np.maximum(ranks - moved(self), 0))

    with (
        mock.patch.object(Catalogs, "place", placing),
        mock.patch("flashrec.front.remote.load", loading),
        mock.patch.object(Catalog, "items_of", one),
        mock.patch.object(Catalog, "items_of_all", several),
        mock.patch.object(Catalog, "items_json", written),
    ):
        yield


@fault("deadline-is-500", soak("no server error but 503 and 504"))
def deadline_is_500() -> Iterator[None]:
    """A request whose deadline passed is answered as a failure of the server."""

    def translate(error: BaseException, names: Mapping[str, str], retry_after_s: int) -> ApiError:
        if isinstance(error, DeadlineError):
            return ApiError(500, "internal_error", str(error))
        return as_api_error(error, names, retry_after_s)

    with mock.patch.object(app, "as_api_error", translate):
        yield


@fault("place-kept-on-cancel", soak("nothing is held when nothing runs"))
def place_kept_on_cancel() -> Iterator[None]:
    """A request whose client goes away keeps its place in the server for ever."""
    real = jobs.admitted

    @contextmanager
    def admitted(context: Context) -> Iterator[None]:
        with real(context):
            try:
                yield
            except ApiError as error:
                if error.kind == "client_disconnected":
                    context.lifecycle.places.take()
                raise

    with mock.patch.object(jobs, "admitted", admitted):
        yield


@fault("memory-leak", soak("memory is flat"))
def memory_leak() -> Iterator[None]:
    """Every wave leaves 2 MiB behind that nobody frees."""
    outcomes = Engine.outcomes
    kept: list[bytes] = []

    def landing(self: Engine, flight: Any) -> list[Any]:
        kept.append(b"x" * _LEAK_BYTES)
        return outcomes(self, flight)

    with mock.patch.object(Engine, "outcomes", landing):
        yield


@fault("unbounded-queue", overload("the load was an overload", Outcome.INVALID))
def unbounded_queue() -> Iterator[None]:
    """The server never counts the requests that it holds, and takes whatever comes."""
    with mock.patch.object(Places, "taken", 0):
        yield


@fault("costly-refusals", overload("goodput at"))
def costly_refusals() -> Iterator[None]:
    """Every refusal computes for 20 ms on the event loop, as if the body were parsed first."""
    real: Any = vars(jobs)["overloaded"]

    def refuse(retry_after_s: int, message: str) -> ApiError:
        end = time.perf_counter() + _COSTLY_S
        while time.perf_counter() < end:
            pass
        return real(retry_after_s, message)  # type: ignore[no-any-return]

    with mock.patch.object(jobs, "overloaded", refuse):
        yield


@fault("slow-refusals", overload("refusals are quick"))
def slow_refusals() -> Iterator[None]:
    """A refusal is sent only when as much time has passed as the last answer took: it waits for the queue."""
    real = Gate.__call__
    last = [0.0]

    async def call(self: Gate, scope: Scope, receive: Receive, send: Send) -> None:
        start = time.perf_counter()

        async def late(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 503:
                await asyncio.sleep(last[0])
            elif message["type"] == "http.response.start" and scope["method"] == "POST":
                last[0] = time.perf_counter() - start
            await send(message)

        await real(self, scope, receive, late)

    with mock.patch.object(Gate, "__call__", call):
        yield


@fault("refused-as-504", overload("nothing but answers and 503"))
def refused_as_504() -> Iterator[None]:
    """Every tenth request that finds the server full is told that its deadline passed."""
    real: Any = vars(jobs)["overloaded"]
    number = itertools.count(1)

    def refuse(retry_after_s: int, message: str) -> ApiError:
        if next(number) % _EVERY == 0:
            return ApiError(504, "deadline_exceeded", message)
        return real(retry_after_s, message)  # type: ignore[no-any-return]

    with mock.patch.object(jobs, "overloaded", refuse):
        yield
