"""The endpoints beside the searches: health, models, server information, metrics, cache, profiler."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

import flashrec
from flashrec.profiler import ProfilerStateError
from flashrec.request import Request
from flashrec.server.catalogs import describe_catalogs
from flashrec.server.context import Context
from flashrec.server.control import control_body, json_response
from flashrec.server.jobs import Job, admitted, check_room, search
from flashrec.server.profiling import StartProfileRequest, profile_options
from flashrec.server.schemas import Body
from flashrec.torch_trace import preload

_STARTED = int(time.time())


def add_health_routes(app: FastAPI, context: Context) -> None:
    """``/health`` says whether requests are taken; ``/health_generate`` makes the engine answer one."""

    @app.get("/health", tags=["health"], response_class=Response)
    async def health() -> Response:
        context.lifecycle.check_ready(context.config.retry_after_s)
        return Response()

    @app.get("/health_generate", tags=["health"], response_class=Response)
    async def health_generate(http: HttpRequest) -> Response:
        free = context.scheduler.engine.catalog is None
        probe = Request(input_ids=(0,), n=1, max_tokens=1 if free else None)
        check_room(context)
        with admitted(context):
            job = Job(requests=[probe], render=lambda results: {})
            await search(context, http, job, time.monotonic() + context.config.request_timeout_s)
        return Response()

    @app.get("/metrics", tags=["health"], response_class=PlainTextResponse)
    async def metrics() -> Response:
        context.metrics.settle()
        text = await context.in_pool(context.metrics.text)
        return Response(text, media_type=context.metrics.content_type)


def add_info_routes(app: FastAPI, context: Context) -> None:
    """``/v1/models``, SGLang's ``/model_info`` and ``/server_info``."""
    engine = context.scheduler.engine

    @app.get("/v1/models", tags=["info"])
    async def models() -> Response:
        entry = {
            "id": context.model_name,
            "object": "model",
            "created": _STARTED,
            "owned_by": "flashrec",
            "root": str(engine.config.model_path),
        }
        return json_response({"object": "list", "data": [entry]})

    @app.get("/model_info", tags=["info"])
    async def model_info() -> Response:
        path = str(engine.config.model_path)
        return json_response({"model_path": path, "tokenizer_path": path, "is_generation": True})

    @app.get("/server_info", tags=["info"])
    async def server_info() -> Response:
        return await context.in_pool(lambda: json_response(_server_info(context)))


def _server_info(context: Context) -> dict[str, Any]:
    engine, config = context.scheduler.engine, context.config
    catalog, layout = engine.catalog, engine.layout
    return {
        "version": flashrec.__version__,
        "model_path": engine.config.model_path,
        "tokenizer_path": engine.config.model_path,
        "served_model_name": context.model_name,
        "engine_config": engine.config.model_dump(mode="json"),
        "engine": engine.stats(),
        "layout": None
        if layout is None
        else {"depth": layout.depth, "sizes": layout.sizes, "begin": layout.begin, "end": layout.end},
        "catalog": None
        if catalog is None
        else {
            "path": catalog.path,
            "digest": catalog.digest,
            "num_sids": catalog.num_sids,
            "num_items": catalog.num_items,
            "depth": catalog.depth,
        },
        **describe_catalogs(context),
        "profiler": engine.profiler.status(),
        "server": {
            "queue_depth": context.scheduler.queue_depth,
            "in_flight": context.lifecycle.places.taken,
            "http_processes": config.http_processes or 0,
            "busy_poll": bool(config.http_processes and config.busy_poll),
            "rows_in_flight": context.scheduler.rows_in_flight,
            "max_in_flight": config.max_in_flight,
            "max_body_bytes": config.max_body_bytes,
            "request_timeout_s": config.request_timeout_s,
            "profiler_dir": config.profiler_dir.resolve(),
        },
    }


def add_control_routes(app: FastAPI, context: Context) -> None:
    """``/flush_cache``, ``/start_profile`` and ``/stop_profile``; each takes effect between two waves.

    They wait for the wave that runs, so they wait on other threads than the tokeniser's.
    """

    @app.post("/flush_cache", tags=["control"], response_class=PlainTextResponse)
    async def flush_cache(http: HttpRequest) -> Response:
        await control_body(context, http, Body)
        pages = await asyncio.to_thread(context.scheduler.flush_cache)
        return PlainTextResponse(f"Cache flushed, {pages} pages freed.\n")

    @app.post("/start_profile", tags=["control"], response_class=PlainTextResponse)
    async def start_profile(http: HttpRequest) -> Response:
        body = await control_body(context, http, StartProfileRequest)
        options = profile_options(body, context.config.profiler_dir)
        await asyncio.to_thread(preload)
        await asyncio.to_thread(context.scheduler.start_profile, options)
        return PlainTextResponse("Start profiling.\n")

    @app.post("/stop_profile", tags=["control"])
    async def stop_profile(http: HttpRequest) -> Response:
        await control_body(context, http, Body)
        await asyncio.to_thread(context.scheduler.stop_profile)
        status = await asyncio.to_thread(context.scheduler.engine.profiler.status)
        if not status["files"] and status["state"] == "idle":
            raise ProfilerStateError("no profile has been started")
        return json_response(status)
