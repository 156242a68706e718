"""The catalogs that an engine serves: by name, one revision in service and at most one that stands by."""

from __future__ import annotations

import itertools
import re
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from flashrec.config import EngineConfig
from flashrec.errors import CatalogError, CatalogStateError, RequestError
from flashrec.search.levels import TrieLevel, device_bytes, trie_levels
from flashrec.sid.cache import load_catalog_and_trie
from flashrec.sid.catalog import Catalog
from flashrec.sid.codes import Packing
from flashrec.sid.layout import SidLayout
from flashrec.transfer import side_stream

DEFAULT = "default"
"""The catalog that the engine starts with, and that answers requests that name none."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LABEL = re.compile(r"(?P<name>[^@]*)@(?P<revision>[0-9]{1,18})")


def packing_of(config: EngineConfig) -> Packing | None:
    """How the catalogs' keys are packed, where the configuration says that they are. Raises :class:`ConfigError`."""
    return None if config.sid_packed is None else Packing.parse(config.sid_packed)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ServedCatalog:
    """One revision of a named catalog, on the host and on the device; it never changes.

    ``revision`` counts the catalogs that the engine has read, from 1, whatever their names. ``tries`` is the trie on
    the device, ``device_bytes`` its size. A request holds the revision that it was validated against, and what the
    device keeps for a revision goes when nobody holds it any more.
    """

    name: str
    revision: int
    catalog: Catalog
    layout: SidLayout
    tries: tuple[TrieLevel, ...]
    device_bytes: int

    @property
    def label(self) -> str:
        """``name@revision``: what answers report, and what a request may ask for instead of the name."""
        return f"{self.name}@{self.revision}"


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """What a name stands for: the revision in service, and the one that a rollback puts in its place."""

    active: ServedCatalog
    standby: ServedCatalog | None = None

    @property
    def revisions(self) -> tuple[ServedCatalog, ...]:
        """Both, or the one that there is."""
        return (self.active,) if self.standby is None else (self.active, self.standby)


class CatalogNames:
    """What the served names stand for; any thread may look."""

    def __init__(self, layout: SidLayout | None) -> None:
        self.layout = layout
        self._places: dict[str, Place] = {}
        self._living: weakref.WeakValueDictionary[int, ServedCatalog] = weakref.WeakValueDictionary()

    def find(self, wanted: str | None) -> ServedCatalog | None:
        """The revision in service under a name, or a revision by its label as long as anybody holds it.

        ``None`` asks for the default, and is the answer where the engine has no catalog.

        Raises:
            RequestError: on ``catalog``: there is none of that name or label.
        """
        if wanted is None and self.layout is None:
            return None
        place = self._places.get(DEFAULT if wanted is None else wanted)
        if place is not None:
            return place.active
        label = _LABEL.fullmatch(wanted or "")
        found = self._living.get(int(label["revision"])) if label else None
        if found is None or label is None or found.name != label["name"]:
            raise RequestError("catalog", f"{_shown(wanted)} is not served here; {self._known()}")
        return found

    def places(self) -> dict[str, Place]:
        """What every name stands for now, in the order in which the names came up."""
        return dict(self._places)

    def _known(self) -> str:
        if not self._places:
            return "this engine was started without a catalog"
        return "served are " + ", ".join(repr(name) for name in self._places)


class Catalogs(CatalogNames):
    """The served catalogs of one engine, all of one layout.

    Any thread may look at them and may :meth:`read` a new one. What a name stands for changes by one assignment, on
    the thread that runs waves: :meth:`place`, :meth:`rollback`, :meth:`drop`.
    """

    def __init__(self, config: EngineConfig, layout: SidLayout | None, device: torch.device) -> None:
        super().__init__(layout)
        self.config = config
        self.device = device
        self.on_read: Callable[[ServedCatalog], None] = lambda served: None
        """Called with a revision before it can go into service or stand by; an error refuses it."""
        self._gone: deque[int] = deque()
        self._revisions = itertools.count(1)

    def living(self, revision: int) -> ServedCatalog:
        """A revision that a request holds."""
        return self._living[revision]

    def read(self, name: str, path: Path) -> ServedCatalog:
        """Read a catalog and put it on the device; it serves nobody yet. Takes seconds; waves go on meanwhile.

        Raises:
            RequestError: on ``name``: it is malformed, or one name too many.
            CatalogError: the file is malformed, does not fit the layout, or its trie does not fit the budget.
            CatalogStateError: the engine was started without a catalog.
        """
        if self.layout is None:
            raise CatalogStateError(
                "this engine was started without a catalog and knows no semantic-ID layout: start it with one"
            )
        self._check_name(name)
        catalog, trie = load_catalog_and_trie(path, self.layout, packing=packing_of(self.config))
        score_end, cells = self.config.score_end, self.config.dense_trie_cells
        needed = device_bytes(trie, score_end=score_end, dense_cells=cells)
        self._check_room(path, needed)
        try:
            with torch.inference_mode(), side_stream(self.device):
                tries = trie_levels(trie, self.device, score_end=score_end, dense_cells=cells)
        except torch.OutOfMemoryError as error:
            raise CatalogError(f"{path}: {needed:,} bytes do not fit on {self.device}: {error}") from None
        served = ServedCatalog(name, next(self._revisions), catalog, self.layout, tuple(tries), needed)
        self._living[served.revision] = served
        weakref.finalize(served, self._gone.append, served.revision).atexit = False
        return served

    def place(self, served: ServedCatalog, *, activate: bool = True) -> Place:
        """Put a revision into service, or on standby; the one that stood by goes.

        Raises:
            RequestError: on ``name``: one name too many, or a new name whose first revision would only stand by.
        """
        self._check_name(served.name)
        known = self._places.get(served.name)
        if known is None and not activate:
            raise RequestError("activate", f"{served.name!r} is a new name: its first catalog can only go into service")
        active = None if known is None else known.active
        place = Place(served, active) if activate or active is None else Place(active, served)
        self._places[served.name] = place
        return place

    def rollback(self, name: str) -> Place:
        """Exchange the revision in service and the one that stands by.

        Raises:
            RequestError: on ``name``: it is not served.
            CatalogStateError: none stands by.
        """
        place = self._place_of(name)
        if place.standby is None:
            raise CatalogStateError(f"catalog {name!r}: there is no other revision to go back to")
        self._places[name] = Place(place.standby, place.active)
        return self._places[name]

    def drop(self, name: str) -> None:
        """Serve a name no more; requests that wait for it are still answered.

        Raises:
            RequestError: on ``name``: it is not served, or it is the default.
        """
        self._place_of(name)
        if name == DEFAULT:
            raise RequestError("name", f"{name!r} answers requests that name no catalog: load another in its place")
        del self._places[name]

    def gone(self) -> list[int]:
        """The revisions that nobody holds any more, each told once."""
        found = []
        while self._gone:
            found.append(self._gone.popleft())
        return found

    def _place_of(self, name: str) -> Place:
        place = self._places.get(name)
        if place is None:
            raise RequestError("name", f"{_shown(name)} is not served here; {self._known()}")
        return place

    def _check_name(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise RequestError("name", f"must be letters, digits, '.', '_' or '-' (64 at most), got {_shown(name)}")
        if name not in self._places and len(self._places) >= self.config.max_catalogs:
            raise RequestError(
                "name", f"{name!r} would be one catalog more than max_catalogs, {self.config.max_catalogs}: drop one"
            )

    def _check_room(self, path: Path, needed: int) -> None:
        taken = sum(served.device_bytes for served in self._living.values())
        if needed + taken > self.config.catalog_bytes:
            raise CatalogError(
                f"{path}: {needed:,} bytes on the device beside {taken:,} of other catalogs are above catalog_bytes, "
                f"{self.config.catalog_bytes:,}: drop one, or raise it"
            )


def _shown(name: str | None) -> str:
    return repr(name if name is None or len(name) <= 100 else f"{name[:100]}...")
