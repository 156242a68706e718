"""Opens a catalog file: gzip and byte-order marks away, errors that say what and where."""

from __future__ import annotations

import gzip
import re
import zlib
from pathlib import Path

from flashrec.errors import CatalogError

GZIP_MAGIC = b"\x1f\x8b"
PARQUET_MAGIC = b"PAR1"
_BOM = b"\xef\xbb\xbf"
_JSON = re.compile(rb"\s*[\[{]")


def bad_row(path: Path, row: int, reason: str) -> CatalogError:
    """The error for one row; rows count from 1, a table's header and blank lines not counted."""
    return CatalogError(f"{path}: row {row}: {reason}")


def read_bytes(path: Path, limit: int = -1) -> bytes:
    """The content (its first ``limit`` bytes), decompressed, without byte-order mark.

    Raises :class:`CatalogError` if the file cannot be read, is a broken gzip file or is empty.
    """
    try:
        with path.open("rb") as raw:
            magic = raw.read(2)
            raw.seek(0)
            if magic == GZIP_MAGIC:
                with gzip.open(raw) as unzipped:
                    data = unzipped.read(limit)
            else:
                data = raw.read(limit)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise CatalogError(f"{path}: broken gzip file: {error}") from error
    except OSError as error:
        raise CatalogError(f"{path}: cannot read the catalog: {error.strerror or error}") from error
    data = data.removeprefix(_BOM)
    if not data.strip():
        raise CatalogError(f"{path}: the catalog is empty")
    return data


def is_json(data: bytes) -> bool:
    """Whether ``data`` can only be JSON: a table's header does not begin with a bracket."""
    return _JSON.match(data) is not None


def decode(path: Path, data: bytes) -> str:
    """``data`` as UTF-8 text. Raises :class:`CatalogError` naming the line of the first bad byte."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise CatalogError(f"{path}: line {line}: byte 0x{data[error.start]:02x} is not UTF-8") from error
