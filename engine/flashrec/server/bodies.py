"""Reads a request's body within limits of size and time."""

from __future__ import annotations

import asyncio

from starlette.requests import Request as HttpRequest

from flashrec.server.errors import ApiError
from flashrec.server.protocol import WHOLE


async def read_body(http: HttpRequest, max_bytes: int, timeout_s: float) -> bytes:
    """The body of ``http``.

    Raises:
        ApiError: 413 above ``max_bytes``, 408 after ``timeout_s`` seconds, 415 when it is not JSON.
    """
    headers = dict(reversed(http.scope["headers"]))  # of one that is there twice the first counts
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    media_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if http.scope.get("extensions") is WHOLE:
        body = await _rest(http, max_bytes)
    else:
        try:
            async with asyncio.timeout(timeout_s):
                body = await _rest(http, max_bytes)
        except TimeoutError:
            raise ApiError(408, "body_timeout", f"body: not complete after {timeout_s:g} seconds", "body") from None
    # A browser can send text/plain to a local server from any page without asking; JSON it cannot.
    if body and media_type != b"application/json":
        raise ApiError(415, "unsupported_media_type", "content-type: must be application/json", "content-type")
    return body


async def _rest(http: HttpRequest, max_bytes: int) -> bytes:
    chunks: list[bytes] = []
    size, more = 0, True
    while more:
        message = await http.receive()
        if message["type"] == "http.disconnect":
            raise ApiError(499, "client_disconnected", "the client went away")
        chunk = message.get("body", b"")
        size += len(chunk)
        chunks.append(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        more = message.get("more_body", False)
    return b"".join(chunks)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, "body_too_large", f"body: larger than {max_bytes} bytes", "body")
