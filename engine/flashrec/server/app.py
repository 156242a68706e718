"""The FastAPI application around a running scheduler."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

import flashrec
from flashrec.errors import FlashRecError
from flashrec.server import openai, recommend, sglang
from flashrec.server.admin import add_control_routes, add_health_routes, add_info_routes
from flashrec.server.backend import Scheduler
from flashrec.server.catalogs import LoadCatalogRequest, RollbackRequest, add_catalog_routes
from flashrec.server.config import ServerConfig
from flashrec.server.context import Context
from flashrec.server.document import describe
from flashrec.server.errors import ApiError, as_api_error
from flashrec.server.hosts import served_hosts
from flashrec.server.jobs import Job, answer, check_room
from flashrec.server.lifecycle import Lifecycle, Places
from flashrec.server.metrics import Metrics
from flashrec.server.middleware import Gate
from flashrec.server.profiling import StartProfileRequest
from flashrec.server.prompts import HistoryPrompt
from flashrec.server.schemas import Body
from flashrec.server.text import TextCodec

B = TypeVar("B", bound=Body)

_BODIES: dict[str, type[Body]] = {
    "/generate": sglang.GenerateRequest,
    "/v1/chat/completions": openai.ChatCompletionRequest,
    "/v1/completions": openai.CompletionRequest,
    "/v1/recommend": recommend.RecommendRequest,
    "/start_profile": StartProfileRequest,
    "/stop_profile": Body,
    "/flush_cache": Body,
    "/catalog": LoadCatalogRequest,
    "/catalog/rollback": RollbackRequest,
}


@dataclass(frozen=True, slots=True)
class Application:
    """What a server runs, and what its routes share."""

    asgi: Gate
    context: Context


def create_app(
    scheduler: Scheduler,
    config: ServerConfig,
    *,
    places: Places | None = None,
    metrics_dir: Path | None = None,
    small_bytes: int = 0,
) -> Application:
    """Build the application. ``scheduler`` is started; the application drains and closes it on shutdown.

    Where several processes serve, ``places`` and ``metrics_dir`` are what they share: see :mod:`flashrec.front`.
    ``small_bytes``: see :class:`Context`.

    Raises:
        ConfigError: the prompt template is not valid.
    """
    engine = scheduler.engine
    codec = TextCodec(engine.tokenizer, engine.layout)
    context = Context(
        scheduler=scheduler,
        config=config,
        codec=codec,
        history_prompt=HistoryPrompt(config.prompt_template, codec),
        metrics=Metrics(metrics_dir),
        lifecycle=Lifecycle(places),
        pool=ThreadPoolExecutor(config.workers, thread_name_prefix="flashrec-host"),
        small_bytes=small_bytes,
    )
    context.metrics.watch(lambda: _gauges(context))
    context.metrics.watch_catalogs(engine.catalogs.places)
    app = FastAPI(title="FlashRec", version=flashrec.__version__, lifespan=_lifespan(context))
    searches = _add_search_routes(app, context)
    add_health_routes(app, context)
    add_info_routes(app, context)
    add_control_routes(app, context)
    add_catalog_routes(app, context)
    _add_error_handlers(app, context)
    describe(app, _BODIES, needs_key=config.api_key is not None)
    gate = Gate(
        app,
        api_key=config.api_key,
        hosts=served_hosts(config.host, config.allowed_hosts),
        searches=searches,
        check_room=lambda: check_room(context),
        metrics=context.metrics,
    )
    return Application(gate, context)


def _gauges(context: Context) -> dict[str, Any]:
    extra = {"queue_depth": context.scheduler.queue_depth, "in_flight": context.lifecycle.places.taken}
    return context.scheduler.engine.stats() | extra


def _lifespan(context: Context) -> Callable[[FastAPI], Any]:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        context.lifecycle.draining = True
        await context.in_pool(context.scheduler.drain, context.config.drain_timeout_s)
        await context.in_pool(context.scheduler.close)
        context.pool.shutdown(wait=True, cancel_futures=True)

    return lifespan


def _add_search_routes(app: FastAPI, context: Context) -> dict[str, ASGIApp]:
    """The routes, for the document and other methods; and what serves a POST to them without a router's detour."""
    searches: dict[str, ASGIApp] = {}

    def add(path: str, model: type[B], prepare: Callable[[Context, B], Job]) -> None:
        async def respond(http: HttpRequest) -> Response:
            try:
                return await answer(context, http, model, lambda body: prepare(context, body))
            except (ApiError, FlashRecError) as error:
                return _failure(context, error)

        async def endpoint(http: HttpRequest) -> Response:
            check_room(context)  # the gate, which asks that, knows the paths to the letter; a router is more lenient
            return await respond(http)

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            response = await respond(HttpRequest(scope, receive))
            await response(scope, receive, send)

        app.add_api_route(path, endpoint, methods=["POST"], tags=["search"], name=path)
        searches[path] = serve

    add("/generate", sglang.GenerateRequest, sglang.prepare)
    add("/v1/chat/completions", openai.ChatCompletionRequest, openai.prepare_chat)
    add("/v1/completions", openai.CompletionRequest, openai.prepare_completion)
    add("/v1/recommend", recommend.RecommendRequest, recommend.prepare)
    return searches


def _failure(context: Context, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        translated = ApiError(error.status_code, "http_error", str(error.detail))
    else:
        translated = as_api_error(error, {}, context.config.retry_after_s)
    context.metrics.errors.labels(translated.kind).inc()
    return translated.response()


def _add_error_handlers(app: FastAPI, context: Context) -> None:
    async def handle(_: HttpRequest, error: Exception) -> Response:
        return _failure(context, error)

    async def handle_unexpected(_: HttpRequest, error: Exception) -> Response:
        return as_api_error(error, {}, context.config.retry_after_s).response()  # the gate counts and logs it

    for kind in (ApiError, HTTPException, FlashRecError):
        app.add_exception_handler(kind, handle)
    app.add_exception_handler(Exception, handle_unexpected)
