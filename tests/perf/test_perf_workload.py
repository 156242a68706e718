"""Workload files: the bundled ones load, malformed ones say what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flashrec.errors import ConfigError
from flashrec_harness.perf.workload import Cell, Workload, from_json, load_workload, names


@pytest.mark.parametrize("name", names())
def test_bundled_workloads_load_under_their_own_name(name: str) -> None:
    assert load_workload(name).name == name


def test_there_is_a_quick_one_a_matrix_and_the_anchors() -> None:
    assert {"quick", "matrix", "serving", "anchors"} <= set(names())
    anchors = load_workload("anchors")
    assert len(anchors.cells) == 11
    assert all(cell.cache == "cold" and cell.anchor["bar"] < cell.anchor["floor"] for cell in anchors.cells)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"name": "w", "cells": []}, "no cells"),
        ({"name": "w", "cells": [{"n": 0}]}, "n must be at least 1, got 0"),
        ({"name": "w", "cells": [{"width": 4}]}, "width"),
        ({"name": "w", "cells": [{"n": 4}], "speed": 1}, "speed"),
        ({"name": "w", "cells": [{"n": 4}, {"n": 4}]}, "two cells are the same point"),
        ({"name": "w", "cells": [{"n": 4}], "processes": 1}, "at least 2 processes"),
        ({"name": "w", "cells": [{"n": 4, "drive": "open"}]}, "an open loop needs a rate"),
        ({"name": "w", "cells": [{"n": 4, "cache": "cold", "requests": 99}]}, "need as many prompts"),
        ({"name": "w", "cells": [{"n": 4}], "score_space": "all"}, "all"),
    ],
)
def test_malformed_workloads_are_usage_errors(body: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_json(body)


def test_unknown_names_and_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there are anchors, arrivals, matrix, quick, serving"):
        load_workload("fast")
    with pytest.raises(ConfigError, match="no such file"):
        load_workload(str(tmp_path / "w.json"))
    (tmp_path / "w.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        load_workload(str(tmp_path / "w.json"))


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"name": "mine", "cells": [{"n": 3, "concurrency": 2}]}))
    assert load_workload(str(path)).cells[0].name == "n=3, 2 at once, histories, warm, batch"


def test_narrowing_makes_a_workload_of_its_own() -> None:
    plan = Workload(name="quick", cells=(Cell(n=10), Cell(n=50)))
    assert plan.narrowed(None, None) is plan
    narrow = plan.narrowed(64, 32)
    assert (narrow.name, [cell.name for cell in narrow.cells]) == (
        "quick-n64-c32",
        ["n=64, 32 at once, histories, warm, batch"],
    )
    assert narrow.cells[0].requests == 32


def test_the_fingerprint_tells_width_cache_and_engine_flags_apart() -> None:
    base = Workload(name="w", cells=(Cell(n=10),))
    for other in (
        Workload(name="w", cells=(Cell(n=11),)),
        Workload(name="w", cells=(Cell(n=10, cache="cold"),)),
        Workload(name="w", cells=(Cell(n=10),), engine={"disable_cuda_graph": True}),
        Workload(name="w", cells=(Cell(n=10),), prompts=65),
    ):
        assert other.fingerprint() != base.fingerprint()
    anchored = Workload(name="w", cells=(Cell(n=10, anchor={"bar": 1.0}),))
    assert anchored.fingerprint() == base.fingerprint()


@pytest.mark.parametrize("text", ["[]", "3", '"quick"', "null"])
def test_a_file_that_holds_no_object_is_a_usage_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "workload.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="a JSON object, got a"):
        load_workload(str(path))
