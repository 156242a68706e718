"""``/catalog``: which catalogs are served, and their reload, rollback and removal while requests come in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

from fastapi import FastAPI
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from flashrec.errors import RequestError
from flashrec.runtime.catalogs import DEFAULT, Place, ServedCatalog
from flashrec.server.context import Context
from flashrec.server.control import control_body, json_response
from flashrec.server.paths import resolve_inside
from flashrec.server.schemas import Body

T = TypeVar("T")


class LoadCatalogRequest(Body):
    """The body of ``/catalog``: a file of ``--catalog-dir`` and the name to serve it under."""

    name: str = DEFAULT
    file: Annotated[str, Field(min_length=1)]
    activate: bool = True


class RollbackRequest(Body):
    """The body of ``/catalog/rollback``."""

    name: str = DEFAULT


def add_catalog_routes(app: FastAPI, context: Context) -> None:
    """Changes take effect between two waves; they and the reading run on other threads than the tokeniser's."""
    scheduler = context.scheduler

    async def changed(action: str, change: Callable[[], T]) -> T:
        outcome = "refused"
        try:
            result = await asyncio.to_thread(change)
            outcome = "ok"
        finally:
            context.metrics.catalog_changes.labels(action, outcome).inc()
        return result

    @app.get("/catalog", tags=["catalog"])
    async def catalogs() -> Response:
        return json_response(describe_catalogs(context))

    @app.post("/catalog", tags=["catalog"])
    async def load(http: HttpRequest) -> Response:
        body = await control_body(context, http, LoadCatalogRequest)

        def change() -> Place:
            path = catalog_file(context.config.catalog_dir, body.file)
            return scheduler.load_catalog(body.name, path, activate=body.activate)

        return json_response(_place(body.name, await changed("load", change)))

    @app.post("/catalog/rollback", tags=["catalog"])
    async def rollback(http: HttpRequest) -> Response:
        body = await control_body(context, http, RollbackRequest)
        place = await changed("rollback", lambda: scheduler.rollback_catalog(body.name))
        return json_response(_place(body.name, place))

    @app.delete("/catalog/{name}", tags=["catalog"])
    async def drop(http: HttpRequest, name: str) -> Response:
        await control_body(context, http, Body)
        await changed("drop", lambda: scheduler.drop_catalog(name))
        return json_response(describe_catalogs(context))


def catalog_file(root: Path | None, wanted: str) -> Path:
    """The file ``wanted`` in ``--catalog-dir``. Raises :class:`RequestError` on ``file``."""
    if root is None:
        raise RequestError("file", "this server takes no catalogs: start it with --catalog-dir")
    path = resolve_inside(root, wanted, field="file", setting="--catalog-dir")
    if not path.is_file():
        raise RequestError("file", f"no such file in {root.resolve()}")
    return path


def describe_catalogs(context: Context) -> dict[str, object]:
    """What ``GET /catalog`` answers."""
    places = context.scheduler.engine.catalogs.places()
    return {"catalogs": [_place(name, place) for name, place in places.items()]}


def _place(name: str, place: Place) -> dict[str, object]:
    standby = None if place.standby is None else _revision(place.standby)
    return {"name": name, "active": _revision(place.active), "standby": standby}


def _revision(served: ServedCatalog) -> dict[str, object]:
    return {
        "catalog": served.label,
        "revision": served.revision,
        "digest": served.catalog.digest,
        "path": served.catalog.path,
        "num_sids": served.catalog.num_sids,
        "num_items": served.catalog.num_items,
        "device_bytes": served.device_bytes,
    }
