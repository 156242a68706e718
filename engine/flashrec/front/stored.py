"""A catalog in files that several processes map: its arrays once in memory, however many look at them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashrec.errors import CatalogStateError
from flashrec.front.wire import StoredCatalog
from flashrec.runtime.catalogs import ServedCatalog
from flashrec.sid.catalog import Catalog
from flashrec.sid.layout import SidLayout
from flashrec.sid.string_index import StringIndex
from flashrec.sid.strings import StringTable


def store(served: ServedCatalog, directory: Path) -> StoredCatalog:
    """Write a revision's arrays into ``directory``, which is made anew. Raises :class:`CatalogStateError`."""
    try:
        _write(served.catalog, directory)
    except OSError as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise CatalogStateError(
            f"catalog {served.label}: its files for the other processes cannot be written to "
            f"{directory.parent}: {error.strerror or error}; make room there, or set TMPDIR"
        ) from None
    return StoredCatalog(served.name, served.revision, served.device_bytes, directory)


def _write(catalog: Catalog, directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)  # what a full disk left of an earlier attempt
    directory.mkdir()
    arrays: dict[str, NDArray[np.generic]] = {
        "sids": catalog.sids,
        "item_start": catalog.item_start,
        "index_start": catalog.index.start,
        "index_order": catalog.index.order,
        **_strings("items", catalog.items),
    }
    if catalog.titles is not None:
        arrays |= _strings("titles", catalog.titles)
    for name, array in arrays.items():
        (directory / name).write_bytes(np.ascontiguousarray(array).data)
    # Types and shapes as JSON: numpy's own headers are Python, see flashrec.sid.cache.
    facts = {
        "arrays": {name: (array.dtype.str, array.shape) for name, array in arrays.items()},
        "digest": catalog.digest,
        "path": str(catalog.path),
        "has_end_level": catalog.has_end_level,
        "duplicates": catalog.duplicates,
        "plain_items": catalog.plain_items,
    }
    (directory / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


def load(stored: StoredCatalog, layout: SidLayout) -> ServedCatalog:
    """Map a revision's files; they may be deleted afterwards. What the device holds of it stays with the engine."""
    facts = json.loads((stored.directory / "facts.json").read_text(encoding="utf-8"))
    arrays = {name: _map(stored.directory / name, *place) for name, place in facts["arrays"].items()}
    catalog = Catalog(
        sids=arrays["sids"],
        item_start=arrays["item_start"],
        items=_table(arrays, "items"),
        index=StringIndex(arrays["index_start"], arrays["index_order"]),
        titles=_table(arrays, "titles") if "titles_blob" in arrays else None,
        digest=facts["digest"],
        path=Path(facts["path"]),
        has_end_level=facts["has_end_level"],
        duplicates=facts["duplicates"],
        plain_items=facts["plain_items"],
    )
    return ServedCatalog(stored.name, stored.revision, catalog, layout, (), stored.device_bytes)


def _strings(name: str, texts: StringTable) -> dict[str, NDArray[np.generic]]:
    return {f"{name}_blob": texts.blob, f"{name}_offsets": texts.offsets}


def _table(arrays: Mapping[str, NDArray[Any]], name: str) -> StringTable:
    return StringTable(arrays[f"{name}_blob"], arrays[f"{name}_offsets"])


def _map(path: Path, dtype: str, shape: Sequence[int]) -> NDArray[Any]:
    if 0 in shape:  # there is nothing to map in an empty file
        return np.empty(shape, dtype)
    mapped: NDArray[Any] = np.memmap(path, dtype, mode="r", shape=tuple(shape))
    return np.asarray(mapped)  # np.memmap's own indexing takes several times as long
