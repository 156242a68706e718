"""A catalog and its trie on disk, found again by the hash of the file they came from (SPEC S3)."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from flashrec.errors import CatalogError
from flashrec.sid import cache_room
from flashrec.sid.catalog import Catalog, load_catalog
from flashrec.sid.codes import Packing
from flashrec.sid.layout import SidLayout
from flashrec.sid.string_index import StringIndex
from flashrec.sid.strings import StringTable
from flashrec.sid.trie import Trie, build_trie

_log = logging.getLogger(__name__)

_VERSION = 3
_BROKEN = (OSError, EOFError, ValueError, KeyError, RuntimeError, zlib.error, zipfile.BadZipFile)
"""What a damaged archive may raise; RuntimeError where its bits say that it is encrypted, or of a kind to come."""

_TABLE = "arrays.json"
"""An archive's member that tells the type and the shape of every other, which is an array's bytes.

Not numpy's own files: their headers are Python, and CPython 3.11 fails where two threads parse Python at once
("AST constructor recursion depth mismatch", a SystemError). A catalog is read beside waves that may compile kernels.
"""

_PART_BYTES = 1 << 20

MIN_BYTES = 1 << 20
"""Smaller files are read anew each time: that takes well under a second."""

Arrays = Mapping[str, NDArray[np.generic]]


def default_cache_dir() -> Path:
    """``FLASHREC_CACHE_DIR``, else ``flashrec`` in ``XDG_CACHE_HOME`` or ``~/.cache``."""
    chosen = os.environ.get("FLASHREC_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flashrec"


def load_catalog_and_trie(
    path: Path | str,
    layout: SidLayout,
    *,
    packing: Packing | None = None,
    cache_dir: Path | None = None,
    min_bytes: int = MIN_BYTES,
) -> tuple[Catalog, Trie]:
    """The catalog in ``path`` and its trie, from the cache if this content was read before.

    Files of at least ``min_bytes`` are cached in ``cache_dir`` (:func:`default_cache_dir`). An entry is keyed
    by the file's content and the layout, written to one side and then renamed, so that a reader never sees
    half of it; a damaged or unwritable cache costs a warning and the time. The entries used longest ago leave
    where all are more than ``FLASHREC_CACHE_BYTES``.

    CPU seconds on one core of a server CPU beside other work, 2026-11-30, random SIDs over 3 x 8,192 with one item
    each, from Parquet: 1.5 million 1.2, from the cache 0.12; 20 million 22.9 (peak of the process 1.6 GB), from the
    cache 1.7. ``flashrec-harness catalogs`` measures it again.

    Raises :class:`CatalogError`, and :class:`~flashrec.errors.ConfigError` for a ``FLASHREC_CACHE_BYTES`` that is no
    number.
    """
    path = Path(path)
    entry = None
    most = cache_room.most_bytes()
    if path.is_file() and path.stat().st_size >= min_bytes:
        entry = (cache_dir or default_cache_dir()) / f"{_key(path, layout, packing)}.zip"
        found = _load(entry, path)
        if found is not None:
            cache_room.mark_used(entry)
            return found
    catalog = load_catalog(path, layout, packing=packing)
    trie = build_trie(catalog.sids, layout.sizes)
    if entry is not None:
        _store(entry, {**_catalog_arrays(catalog), **trie.arrays()}, most)
    return catalog, trie


def _key(path: Path, layout: SidLayout, packing: Packing | None) -> str:
    """Hash of everything that the catalog and its trie depend on."""
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
    except OSError as error:
        raise CatalogError(f"{path}: cannot read the catalog: {error.strerror or error}") from error
    digest.update(repr((_VERSION, layout.texts, layout.end is None, packing)).encode())
    return digest.hexdigest()


def _catalog_arrays(catalog: Catalog) -> dict[str, NDArray[np.generic]]:
    """What :func:`_catalog` needs, in few bytes: reading and checking them is what loading from the cache costs."""
    facts = json.dumps([catalog.digest, catalog.has_end_level, catalog.duplicates, catalog.plain_items])
    arrays = {
        "sids": _narrow(catalog.sids),
        "items_per_sid": _narrow(np.diff(catalog.item_start)),
        **_string_arrays("items", catalog.items),
        "index_start": catalog.index.start,
        "index_order": catalog.index.order,
        "facts": np.frombuffer(facts.encode(), dtype=np.uint8),
    }
    return arrays if catalog.titles is None else arrays | _string_arrays("titles", catalog.titles)


def _catalog(arrays: Arrays, path: Path) -> Catalog:
    """The inverse of :func:`_catalog_arrays`. Raises :class:`KeyError` if an array is missing."""
    digest, has_end_level, duplicates, plain_items = json.loads(arrays["facts"].tobytes())
    return Catalog(
        sids=_int32(arrays["sids"]),
        item_start=_starts(arrays["items_per_sid"], np.dtype(np.int32)),
        items=_strings(arrays, "items"),
        index=StringIndex(_int32(arrays["index_start"]), _int32(arrays["index_order"])),
        titles=_strings(arrays, "titles") if "titles_blob" in arrays else None,
        digest=digest,
        path=path,
        has_end_level=has_end_level,
        duplicates=duplicates,
        plain_items=plain_items,
    )


def _string_arrays(name: str, texts: StringTable) -> dict[str, NDArray[np.generic]]:
    return {f"{name}_blob": texts.blob, f"{name}_lengths": _narrow(np.diff(texts.offsets))}


def _strings(arrays: Arrays, name: str) -> StringTable:
    offsets = _starts(arrays[f"{name}_lengths"], np.dtype(np.int64))
    return StringTable(arrays[f"{name}_blob"].astype(np.uint8, copy=False), offsets)


def _narrow(values: NDArray[np.integer]) -> NDArray[np.integer]:
    """Non-negative ``values`` in the narrowest type that holds them."""
    return values.astype(np.min_scalar_type(int(values.max(initial=0))))


def _starts(counts: NDArray[np.generic], dtype: np.dtype[Any]) -> NDArray[Any]:
    """``[n + 1]``: 0 and the running sums of ``counts``."""
    starts = np.zeros(len(counts) + 1, dtype=dtype)
    np.cumsum(counts, out=starts[1:])
    return starts


def _int32(array: NDArray[np.generic]) -> NDArray[np.int32]:
    return array.astype(np.int32, copy=False)


def _load(entry: Path, path: Path) -> tuple[Catalog, Trie] | None:
    try:
        with zipfile.ZipFile(entry) as archive:
            with _stored(archive, _TABLE) as member:
                table = json.loads(member.read())
            arrays = {name: _read(archive, name, *told) for name, told in table.items()}
        return _catalog(arrays, path), Trie.from_arrays(arrays)
    except FileNotFoundError:
        return None
    except _BROKEN as error:
        _log.warning("%s: damaged catalog cache, reading %s anew: %s", entry, path, error)
        return None


def _read(archive: zipfile.ZipFile, name: str, dtype: str, shape: Sequence[int]) -> NDArray[np.generic]:
    """One array. Raises :class:`zipfile.BadZipFile` where its checksum is not that of its bytes."""
    array: NDArray[np.generic] = np.empty(shape, dtype=dtype)
    left = array.reshape(-1).view(np.uint8).data
    with _stored(archive, name) as member:
        while part := member.read(_PART_BYTES):  # to its end, where the checksum is looked at
            left[: len(part)] = part
            left = left[len(part) :]
    if left:
        raise EOFError(f"{name}: {len(left)} bytes are missing")
    return array


def _stored(archive: zipfile.ZipFile, name: str) -> IO[bytes]:
    """A member to read, in whose place no decompressor is asked, which would have errors of its own."""
    info = archive.getinfo(name)
    if info.compress_type != zipfile.ZIP_STORED:
        raise zipfile.BadZipFile(f"{name} is compressed, as no entry is written")
    return archive.open(info)


def _store(entry: Path, arrays: Arrays, most: int) -> None:
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=entry.parent, prefix=f"{entry.stem}.", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file, zipfile.ZipFile(file, "w") as archive:
                _write(archive, arrays)
            os.replace(name, entry)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        for gone in cache_room.make_room(entry.parent, most):
            _log.info("%s: removed from the catalog cache, which holds %s=%s", gone, cache_room.VARIABLE, most)
    except OSError as error:
        _log.warning("%s: cannot write the catalog cache: %s", entry, error)


def _write(archive: zipfile.ZipFile, arrays: Arrays) -> None:
    table = {name: (array.dtype.str, array.shape) for name, array in arrays.items()}
    with archive.open(_TABLE, "w") as member:  # unlike writestr, without the time of day: equal content, equal bytes
        member.write(json.dumps(table).encode())
    for name, array in arrays.items():
        with archive.open(name, "w", force_zip64=True) as member:
            member.write(np.ascontiguousarray(array).data)
