"""Reads a request's body within limits of size and time."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from flashrec.server.errors import ApiError


async def read_body(http: HttpRequest, max_bytes: int, timeout_s: float) -> bytes:
    """The body of ``http``.

    Raises:
        ApiError: 413 above ``max_bytes``, 408 after ``timeout_s`` seconds, 415 when it is not JSON.
    """
    declared = http.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    media_type = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in http.stream():
                size += len(chunk)
                if size > max_bytes:
                    raise _too_large(max_bytes)
                chunks.append(chunk)
    except TimeoutError:
        raise ApiError(408, "body_timeout", f"body: not complete after {timeout_s:g} seconds", "body") from None
    except ClientDisconnect:
        raise ApiError(499, "client_disconnected", "the client went away") from None
    # A browser can send text/plain to a local server from any page without asking; JSON it cannot.
    if size and media_type != "application/json":
        raise ApiError(415, "unsupported_media_type", "content-type: must be application/json", "content-type")
    return b"".join(chunks)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, "body_too_large", f"body: larger than {max_bytes} bytes", "body")
