"""The FastAPI application around a running scheduler."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

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
from flashrec.server.jobs import Job, answer
from flashrec.server.lifecycle import Lifecycle
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


def create_app(scheduler: Scheduler, config: ServerConfig) -> FastAPI:
    """Build the application. ``scheduler`` is started; the application drains and closes it on shutdown.

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
        metrics=Metrics(),
        lifecycle=Lifecycle(),
        pool=ThreadPoolExecutor(config.workers, thread_name_prefix="flashrec-host"),
    )
    context.metrics.watch(lambda: _gauges(context))
    context.metrics.watch_catalogs(engine.catalogs.places)
    app = FastAPI(title="FlashRec", version=flashrec.__version__, lifespan=_lifespan(context))
    app.state.context = context
    _add_search_routes(app, context)
    add_health_routes(app, context)
    add_info_routes(app, context)
    add_control_routes(app, context)
    add_catalog_routes(app, context)
    _add_error_handlers(app, context)
    app.add_middleware(Gate, api_key=config.api_key, metrics=context.metrics)
    describe(app, _BODIES, needs_key=config.api_key is not None)
    return app


def _gauges(context: Context) -> dict[str, Any]:
    extra = {"queue_depth": context.scheduler.queue_depth, "in_flight": context.lifecycle.in_flight}
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


def _add_search_routes(app: FastAPI, context: Context) -> None:
    def add(path: str, model: type[B], prepare: Callable[[Context, B], Job]) -> None:
        async def endpoint(http: HttpRequest) -> Response:
            return await answer(context, http, model, lambda body: prepare(context, body))

        app.add_api_route(path, endpoint, methods=["POST"], tags=["search"], name=path)

    add("/generate", sglang.GenerateRequest, sglang.prepare)
    add("/v1/chat/completions", openai.ChatCompletionRequest, openai.prepare_chat)
    add("/v1/completions", openai.CompletionRequest, openai.prepare_completion)
    add("/v1/recommend", recommend.RecommendRequest, recommend.prepare)


def _add_error_handlers(app: FastAPI, context: Context) -> None:
    async def handle(_: HttpRequest, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            translated = ApiError(error.status_code, "http_error", str(error.detail))
        else:
            translated = as_api_error(error, {}, context.config.retry_after_s)
        context.metrics.errors.labels(translated.kind).inc()
        return translated.response()

    for kind in (ApiError, HTTPException, FlashRecError):
        app.add_exception_handler(kind, handle)
