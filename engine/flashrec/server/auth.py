"""The optional API key."""

from __future__ import annotations

import hmac


def authorized(header: str | None, api_key: str | None) -> bool:
    """Whether an ``Authorization`` header holds the key; every wrong key takes the same time."""
    if api_key is None:
        return True
    scheme, _, token = (header or "").partition(" ")
    given = token.strip() if scheme.lower() == "bearer" else ""
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), api_key.encode())
