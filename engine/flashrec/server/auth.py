"""Who may ask: the optional API key, and no web page of another origin."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from urllib.parse import urlsplit


def authorized(header: str | None, api_key: str | None) -> bool:
    """Whether an ``Authorization`` header holds the key; every wrong key takes the same time."""
    if api_key is None:
        return True
    scheme, _, token = (header or "").partition(" ")
    given = token.strip() if scheme.lower() == "bearer" else ""
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), api_key.encode())


def foreign_page(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a browser sent this for a page of another origin; ``headers`` in lower case.

    Any page may make a browser POST to a server on the reader's machine. ``Sec-Fetch-Site`` says for whom, and no
    page can forge it (W3C Fetch Metadata); an older browser sends ``Origin`` alone. Programs send neither.
    """
    site = headers.get(b"sec-fetch-site")
    if site is not None:
        return site not in (b"same-origin", b"none")
    origin = headers.get(b"origin")
    if origin is None:
        return False
    try:
        authority = urlsplit(origin.decode("latin-1")).netloc
    except ValueError:
        return True
    return authority.lower() != headers.get(b"host", b"").decode("latin-1").lower()
