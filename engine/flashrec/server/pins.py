"""Which revisions of catalogs one HTTP request is answered from: one per name, held until the answer is written."""

from __future__ import annotations

from flashrec.errors import RequestError
from flashrec.runtime.catalogs import ServedCatalog
from flashrec.server.backend import Engine


class Pins:
    """Names resolved once per HTTP request, so that a reload in between cannot mix revisions in its answer.

    ``field`` is what the client calls the name.
    """

    def __init__(self, engine: Engine, field: str = "catalog") -> None:
        self._engine = engine
        self._field = field
        self._held: dict[str | None, ServedCatalog | None] = {}

    def find(self, name: str | None) -> ServedCatalog | None:
        """The revision that a name stood for when it was first asked for; see :meth:`Catalogs.find`.

        Raises :class:`RequestError` on the client's field.
        """
        if name not in self._held:
            try:
                self._held[name] = self._engine.catalogs.find(name)
            except RequestError as error:
                raise RequestError(self._field, error.message) from None
        return self._held[name]

    def label(self, name: str | None, constrained: bool | None) -> str | None:
        """What a :class:`~flashrec.request.Request` says to be searched in just that revision."""
        if constrained is False:
            return name
        served = self.find(name)
        return None if served is None else served.label
