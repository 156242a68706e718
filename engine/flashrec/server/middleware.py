"""The outermost layer: request id, API key, no foreign web pages or hosts, no search too many, log line, counters."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Callable, Mapping

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flashrec.server.auth import authorized, foreign_page
from flashrec.server.errors import ApiError, as_api_error
from flashrec.server.hosts import Hosts
from flashrec.server.metrics import Metrics

logger = logging.getLogger("flashrec.access")

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_OPEN = frozenset({"/health"})
"""Paths that need no API key: what a supervisor asks before it knows any secret."""
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing (RFC 9110, 9.2.1)."""
_SOON_S = 0.001
"""How long after an answer it is counted and logged. A client that asks again at once would wait for that; by then the
device works for it."""


class Gate:
    """Plain ASGI: a wrapper around ``receive`` would hide a client's disconnect from the routes.

    ``searches`` serve a POST to their paths, and take a place each; ``check_room`` raises :class:`ApiError` where none
    is left.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_key: str | None,
        hosts: Hosts,
        searches: Mapping[str, ASGIApp],
        check_room: Callable[[], None],
        metrics: Metrics,
    ) -> None:
        self._app = app
        self._searches = searches
        self._check_room = check_room
        self._api_key = api_key
        self._hosts = hosts
        self._metrics = metrics
        self._settling = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given if _REQUEST_ID.fullmatch(given) else os.urandom(16).hex().encode()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        try:
            refusal = self._refusal(scope, headers)
            if refusal is None:
                search = self._searches.get(scope["path"]) if scope["method"] == "POST" else None
                await (search or self._app)(scope, receive, send_with_id)
            else:
                self._metrics.errors.labels(refusal.kind).inc()
                await refusal.response()(scope, receive, send_with_id)
        except Exception as error:
            logger.exception("request %s failed", request_id.decode())
            self._metrics.errors.labels("internal_error").inc()
            if status == 0:
                await as_api_error(error, {}, 1).response()(scope, receive, send_with_id)
        finally:
            self._metrics.later(self._count, scope, request_id, status, time.perf_counter() - start)
            if not self._settling:
                self._settling = True
                asyncio.get_running_loop().call_later(_SOON_S, self._settle)

    def _refusal(self, scope: Scope, headers: Mapping[bytes, bytes]) -> ApiError | None:
        hosts = [name for name, _ in scope["headers"]].count(b"host")
        if hosts > 1 or (hosts == 0 and scope["http_version"] == "1.1"):  # RFC 9112, 3.2; the parser does not look
            return ApiError(400, "invalid_value", f"host: HTTP/1.1 has one such header, got {hosts}", "host")
        elsewhere = self._hosts.refuses(headers.get(b"host"))
        if elsewhere is not None:
            return ApiError(403, "host_not_allowed", elsewhere, "host")
        key = headers.get(b"authorization", b"").decode("latin-1")
        if scope["path"] not in _OPEN and not authorized(key, self._api_key):
            return ApiError(401, "unauthorized", "authorization: send 'Bearer' and this server's API key")
        if scope["method"] not in _SAFE and foreign_page(headers):
            return ApiError(
                403, "cross_origin", "origin: a web page of another origin may not ask this server", "origin"
            )
        if scope["method"] == "POST" and scope["path"] in self._searches:
            try:
                self._check_room()
            except ApiError as full:
                return full
        return None

    def _settle(self) -> None:
        self._settling = False
        self._metrics.settle()

    def _count(self, scope: Scope, request_id: bytes, status: int, seconds: float) -> None:
        known = scope["path"] if scope["path"] in self._searches else "other"
        route = getattr(scope.get("route"), "path", known)
        self._metrics.requests.labels(route, str(status)).inc()
        self._metrics.latency.labels(route).observe(seconds)
        if logger.isEnabledFor(logging.INFO):
            line = {
                "request_id": request_id.decode(),
                "method": scope["method"],
                "path": scope["path"][:200],
                "status": status,
                "ms": round(seconds * 1e3, 3),
            }
            logger.info(orjson.dumps(line).decode())
