"""A search request's way through the server: parse, tokenise, search, respond."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import orjson
from pydantic import ValidationError
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from flashrec.errors import DeadlineError, EngineFault, RequestError
from flashrec.profiler import trace_range
from flashrec.request import LazyBeams, Request, Result
from flashrec.server.bodies import read_body
from flashrec.server.context import Context
from flashrec.server.errors import ApiError, as_api_error, from_validation, overloaded
from flashrec.server.pins import Pins
from flashrec.server.schemas import Body

B = TypeVar("B", bound=Body)

Payload = dict[str, object] | list[dict[str, object]]
Render = Callable[[Sequence[Result]], Payload | list[Payload]]
_COLUMN_BYTES = 64
"""What a beam that is written from columns counts as in bytes of host work: a front writes up to 1,024 on its event
loop, in 1.2 to 1.9 ms (AMD EPYC, 2026-12-02). A thread would need the interpreter's lock for as long, and be woken."""
_OBJECT_BYTES, _TOKEN_BYTES = 128, 10
"""The same of any other beam, and of each of its tokens: 1,024 beams of 4 tokens take 3.1 ms there, of 64 tokens 18."""
_GRACE_S = 0.5
"""How much longer than its deadline the scheduler may take to answer 504 itself."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What an endpoint makes of a body.

    ``render`` turns the results, one per request, into the JSON answer, or with ``stream`` into the list of
    server-sent events; a catalog's beam is ``beam_bytes`` of host work for it. ``names`` maps :class:`Request`'s fields
    to the client's, for error messages. ``pins`` hold the catalogs that the requests name by label.
    """

    requests: Sequence[Request]
    render: Render
    names: Mapping[str, str] = field(default_factory=dict)
    timeout: float | None = None
    stream: bool = False
    pins: Pins | None = None
    beam_bytes: int = _COLUMN_BYTES


async def answer(context: Context, http: HttpRequest, model: type[B], prepare: Callable[[B], Job]) -> Response:
    """Serve one search, for which there is room. Every failure is an :class:`ApiError` or an error that :mod:`.errors`
    translates."""
    start = time.monotonic()
    with admitted(context):
        body = await read_body(http, context.config.max_body_bytes, context.config.body_timeout_s)
        job = await context.on_host(len(body), _parse, context, model, prepare, body)
        deadline = start + _timeout(job, context.config.request_timeout_s)
        results = await search(context, http, job, deadline, size=len(body))
        return await context.on_host(_work(job, results), _respond, context, job, results)


def check_room(context: Context) -> None:
    """Raises :class:`ApiError` 503 when the server is full or shutting down."""
    lifecycle, config = context.lifecycle, context.config
    lifecycle.check_ready(config.retry_after_s)
    taken = lifecycle.places.taken
    if taken >= config.max_in_flight:
        raise overloaded(config.retry_after_s, f"{taken} requests are in flight: come back later")
    if context.scheduler.queue_depth >= context.scheduler.engine.config.queue_size:
        # Said before the body is read and tokenised, since refusing must cost next to nothing when there is most of it.
        raise overloaded(config.retry_after_s, f"{context.scheduler.queue_depth} requests wait: come back later")


class admitted:  # noqa: N801 - used as a function: ``with admitted(context):``
    """Hold one of the server's places, where :func:`check_room` found one. Raises :class:`ApiError` 503 when the server
    shuts down meanwhile."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._context.lifecycle.places.take()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        lifecycle = self._context.lifecycle
        lifecycle.places.give()
        # uvicorn cancels what a shutdown has waited for in vain; left alone, it would answer a bare 500.
        if kind is asyncio.CancelledError and lifecycle.draining:
            raise lifecycle.refusal(self._context.config.retry_after_s) from None


def _parse(context: Context, model: type[B], prepare: Callable[[B], Job], body: bytes) -> Job:
    with trace_range("flashrec.tokenize"), context.metrics.phase("tokenize"):
        try:
            return prepare(model.model_validate_json(body))
        except ValidationError as error:
            raise from_validation(error, model) from None


def _work(job: Job, results: Sequence[Result]) -> int:
    """What there is to write, in bytes of host work: see :meth:`Context.on_host`."""
    work = 0
    for result in results:
        if isinstance(result.beams, LazyBeams):
            work += job.beam_bytes * len(result.beams)
        else:
            work += sum(_OBJECT_BYTES + _TOKEN_BYTES * len(beam.token_ids) for beam in result.beams)
    return work


def _respond(context: Context, job: Job, results: Sequence[Result]) -> Response:
    metrics = context.metrics
    with trace_range("flashrec.respond"), metrics.phase("respond"):
        metrics.later(metrics.answered, results)
        payload = job.render(results)
        if not job.stream:
            return Response(orjson.dumps(payload), media_type="application/json")
        events = [b"data: " + orjson.dumps(event) + b"\n\n" for event in payload]
        return Response(
            b"".join(events) + b"data: [DONE]\n\n",
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache"},
        )


def _timeout(job: Job, latest: float) -> float:
    if job.timeout is not None and job.timeout > latest:
        raise ApiError(400, "invalid_value", f"timeout: must be at most {latest:g} seconds", "timeout")
    return latest if job.timeout is None else job.timeout


async def search(context: Context, http: HttpRequest, job: Job, deadline: float, *, size: int = 0) -> list[Result]:
    """Submit all requests of a job, or none; cancel them when the client goes, time is up or one fails.

    ``deadline`` is on :func:`time.monotonic`'s clock; ``size`` in bytes says how much there is to submit.
    """
    submission = _Submission(context, job, deadline)
    with context.metrics.phase("search"):
        try:
            await context.on_host(size, submission.submit)
            results = await _await_results(context, http, submission.futures, deadline)
        except EngineFault as error:
            context.lifecycle.report_fault(error)
            raise
        except RequestError as error:
            raise as_api_error(error, job.names, context.config.retry_after_s) from None
        finally:
            submission.cancel_unfinished()
    return results


class _Submission:
    """The requests of one job in the scheduler's queue, under ids that no client chose."""

    def __init__(self, context: Context, job: Job, deadline: float) -> None:
        prefix = os.urandom(16).hex()
        self._scheduler = context.scheduler
        self._requests = [request.named(f"{prefix}-{index}") for index, request in enumerate(job.requests)]
        self._deadline = deadline
        self._abandoned = False
        self.futures: list[Future[Result]] = []

    def submit(self) -> None:
        """Runs on a worker thread: the scheduler validates on the caller's. Raises :class:`RequestError`."""
        self.futures = self._scheduler.submit_all(self._requests, self._deadline)
        if self._abandoned:
            self.cancel_unfinished()

    def cancel_unfinished(self) -> None:
        """Nobody waits any more, not even for a submission that is still under way."""
        self._abandoned = True
        for request, future in zip(self._requests, self.futures, strict=False):
            if not future.done():
                self._scheduler.cancel(request.rid)
        # A future holds its error, whose traceback holds frames that hold the future: a circle around the catalogs.
        self.futures.clear()


async def _await_results(
    context: Context, http: HttpRequest, futures: Sequence[Future[Result]], deadline: float
) -> list[Result]:
    """The results of all, or what went wrong first."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def end() -> None:
        if not ended.done():
            ended.set_result(None)

    left = len(futures)

    def settle(future: Future[Result]) -> None:
        nonlocal left
        left -= 1
        if left == 0 or future.cancelled() or future.exception() is not None:
            end()

    _watch(futures, functools.partial(_on_loop, loop, settle))
    gone = loop.create_task(_disconnected(http))
    gone.add_done_callback(lambda _: end())
    timer = loop.call_later(max(0.0, deadline - time.monotonic()) + _GRACE_S, end)
    try:
        await ended
        results = list(map(Future.result, filter(Future.done, futures)))  # raises what went wrong with one
        if len(results) == len(futures):
            return results
        if gone.done():
            context.metrics.cancelled.inc()
            raise ApiError(499, "client_disconnected", "the client went away")
        raise DeadlineError("the request's deadline passed")
    finally:
        # The futures stay: cancelling one would race the engine thread that is about to set its result.
        timer.cancel()
        gone.cancel()


def _watch(futures: Sequence[Future[Result]], ended: Callable[[Future[Result]], None]) -> None:
    for future in futures:  # in a frame of its own, which no error will hold: see cancel_unfinished
        future.add_done_callback(ended)


def _on_loop(loop: asyncio.AbstractEventLoop, settle: Callable[[Future[Result]], None], future: Future[Result]) -> None:
    """Settle a future on the event loop: at once where it ends there, as it does in a front's."""
    try:
        here = asyncio.get_running_loop() is loop
    except RuntimeError:
        here = False
    if here:
        settle(future)
        return
    with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody waits any more
        loop.call_soon_threadsafe(settle, future)


async def _disconnected(http: HttpRequest) -> None:
    """Return when the client has gone; the body has been read, so nothing else can arrive."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
