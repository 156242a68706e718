"""Waves while catalogs are loaded, replaced and rolled back.

A catalog of the probe's allowed semantic IDs alone must give the bits of the probe that is restricted to them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flashrec import Engine
from flashrec.runtime.catalogs import DEFAULT
from flashrec_harness.determinism.lab import Lab, Place

_OTHER = "listed"


def catalogs(lab: Lab, engine: Engine) -> None:
    assert engine.catalog is not None
    own, listed = engine.catalog.path, lab.probe("allow", engine).allow_sids or ()
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "listed.json"
        _write(other, listed)
        for turn in range(1 if lab.task.quick else 2):
            rng = lab.task.rng("catalogs", turn)
            lab.wave(engine, Place("catalogs", "the list as a filter"), "allow", [], rng)
            engine.load_catalog(_OTHER, other)
            mates = [replace(mate, catalog=_OTHER) for mate in lab.mates(rng, 20)]
            lab.wave(engine, Place("catalogs", "beside another catalog"), "default", mates, rng)
            _in_other(lab, engine, "the list as a catalog", _OTHER)
            engine.load_catalog(DEFAULT, other)
            _in_other(lab, engine, "the list in the catalog's place", DEFAULT)
            engine.rollback_catalog(DEFAULT)
            lab.wave(engine, Place("catalogs", "after a rollback"), "default", lab.mates(rng, 9), rng)
            engine.load_catalog(DEFAULT, own)
            lab.wave(engine, Place("catalogs", "after a reload"), "default", lab.mates(rng, 30), rng)
            engine.drop_catalog(_OTHER)
            lab.report.count("catalogs", "reloads", 3)


def _in_other(lab: Lab, engine: Engine, case: str, name: str) -> None:
    """Search the listed semantic IDs as a catalog; what comes out is compared with the probe ``allow``."""
    request = replace(lab.probe("default", engine), rid="allow", catalog=name)
    result = engine.generate([request])[0]
    lab.observe(engine, Place("catalogs", case), result, [request])


def _write(path: Path, sids: Sequence[tuple[int, ...]]) -> None:
    path.write_text(json.dumps({",".join(map(str, sid)): str(number) for number, sid in enumerate(sids)}))
