"""Paths that a request names: inside a configured directory, or refused (SPEC V5)."""

from __future__ import annotations

from pathlib import Path

from flashrec.errors import RequestError


def resolve_inside(root: Path, wanted: str | None, *, field: str, setting: str) -> Path:
    """``wanted`` inside ``root``, symbolic links followed; ``root`` itself where nothing is wanted.

    A relative path is taken from the working directory if that lands inside (``./profiles/run1``), else
    from ``root`` (``run1``). Raises :class:`RequestError` on ``field`` for anything outside, naming the ``setting``
    that moves the directory.
    """
    base = root.resolve()
    if not wanted:
        return base
    if "\0" in wanted or len(wanted) > 4096:
        raise RequestError(field, "is not a path")
    try:
        candidates = [Path(wanted).resolve(), (base / wanted).resolve()]
    except (OSError, RuntimeError) as error:
        raise RequestError(field, f"cannot be resolved: {error}") from None
    for candidate in candidates:
        if candidate.is_relative_to(base):
            return candidate
    raise RequestError(field, f"must lie inside {base}, which {setting} sets")
