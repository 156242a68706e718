"""A catalog in files that several processes map: its arrays once in memory, however many look at them."""

from __future__ import annotations

import json
import shutil
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
        np.save(directory / f"{name}.npy", array, allow_pickle=False)
    facts = {
        "digest": catalog.digest,
        "path": str(catalog.path),
        "has_end_level": catalog.has_end_level,
        "duplicates": catalog.duplicates,
    }
    (directory / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


def load(stored: StoredCatalog, layout: SidLayout) -> ServedCatalog:
    """Map a revision's files; they may be deleted afterwards. What the device holds of it stays with the engine."""
    directory = stored.directory
    facts = json.loads((directory / "facts.json").read_text(encoding="utf-8"))
    has_titles = (directory / "titles_blob.npy").is_file()
    catalog = Catalog(
        sids=_map(directory, "sids"),
        item_start=_map(directory, "item_start"),
        items=_table(directory, "items"),
        index=StringIndex(_map(directory, "index_start"), _map(directory, "index_order")),
        titles=_table(directory, "titles") if has_titles else None,
        digest=facts["digest"],
        path=Path(facts["path"]),
        has_end_level=facts["has_end_level"],
        duplicates=facts["duplicates"],
    )
    return ServedCatalog(stored.name, stored.revision, catalog, layout, (), stored.device_bytes)


def _strings(name: str, texts: StringTable) -> dict[str, NDArray[np.generic]]:
    return {f"{name}_blob": texts.blob, f"{name}_offsets": texts.offsets}


def _table(directory: Path, name: str) -> StringTable:
    return StringTable(_map(directory, f"{name}_blob"), _map(directory, f"{name}_offsets"))


def _map(directory: Path, name: str) -> NDArray[Any]:
    path = directory / f"{name}.npy"
    array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    return np.asarray(array)  # np.memmap's own indexing takes several times as long
