"""How much the folder of cached catalogs may hold: what was used longest ago leaves first."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

from flashrec.errors import ConfigError

VARIABLE = "FLASHREC_CACHE_BYTES"
DEFAULT_BYTES = 8 << 30

_ENTRY = re.compile(r"[0-9a-f]{32}\.(zip|npz)")
"""An entry, of this version or of one that wrote numpy's files; the folder is shared with what is not a catalog."""

_UNFINISHED = re.compile(r"[0-9a-f]{32}\.\w+\.tmp")
_ABANDONED_S = 24 * 3600.0
"""No catalog takes a day to write: whoever began a file this old was killed."""


def most_bytes() -> int:
    """``FLASHREC_CACHE_BYTES``, else 8 GiB. Raises :class:`ConfigError` where it is no number of bytes."""
    text = os.environ.get(VARIABLE)
    if not text:
        return DEFAULT_BYTES
    if not re.fullmatch(r"[0-9]+", text):
        raise ConfigError(f"{VARIABLE}: {text!r} is no number of bytes, such as {DEFAULT_BYTES}; 0 keeps no catalog")
    return int(text)


def mark_used(entry: Path) -> None:
    """Make ``entry`` the one that leaves last; in a folder that cannot be written nothing leaves at all."""
    with contextlib.suppress(OSError):
        os.utime(entry)


def make_room(folder: Path, most: int) -> list[Path]:
    """Delete the catalogs of ``folder`` used longest ago until at most ``most`` bytes are left; returns which.

    A process that reads one of them goes on reading it. Raises :class:`OSError`.
    """
    leaving = []
    kept = 0
    for used, size, path in sorted(_entries(folder), reverse=True):
        kept += size
        if kept > most or (_UNFINISHED.fullmatch(path.name) and time.time() - used > _ABANDONED_S):
            leaving.append(path)
    for path in leaving:
        path.unlink(missing_ok=True)
    return leaving


def _entries(folder: Path) -> list[tuple[float, int, Path]]:
    """When each was used last (seconds since 1970), its bytes and where it is."""
    found = []
    for path in folder.iterdir():
        if _ENTRY.fullmatch(path.name) or _UNFINISHED.fullmatch(path.name):
            with contextlib.suppress(FileNotFoundError):  # another process made room, or finished writing
                facts = path.stat()
                found.append((facts.st_mtime, facts.st_size, path))
    return found
