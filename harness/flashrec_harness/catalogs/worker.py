"""One measuring process: ``python -m flashrec_harness.catalogs.worker TASK.json RESULT.json``.

Runs on one core. Seconds are CPU time of the process; the peak is its resident set's, interpreter and imports
included.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from flashrec.sid.cache import load_catalog_and_trie
from flashrec.sid.catalog import Catalog
from flashrec.sid.trie import Trie, build_trie
from flashrec_harness.catalogs.random_catalog import random_layout

T = TypeVar("T")
_NAMES_ASKED = 10_000


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """``task``: ``catalog`` and ``cache_dir``. Loads the catalog, from the cache where that holds it."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    before = _peak_mb()
    (catalog, trie), seconds, wall = _timed(
        lambda: load_catalog_and_trie(Path(task["catalog"]), random_layout(), cache_dir=Path(task["cache_dir"]))
    )
    peak = _peak_mb()
    _, build_s, _ = _timed(lambda: build_trie(catalog.sids, trie.sizes))
    names = _some_items(catalog)
    _, find_s, _ = _timed(lambda: catalog.ranks_emptied_by(names))
    return {
        "sids": catalog.num_sids,
        "load_cpu_s": seconds,
        "load_wall_s": wall,
        "trie_cpu_s": build_s,
        "find_10000_items_cpu_s": find_s,
        "device_mb": trie.device_bytes() / 1e6,
        "peak_mb": peak,
        "peak_before_mb": before,
        "digest": catalog.digest,
        "dense_equals_csr": _dense_levels_equal(trie),
    }


def _some_items(catalog: Catalog) -> list[str]:
    step = max(catalog.num_items // _NAMES_ASKED, 1)
    return [catalog.items[position] for position in range(0, step * min(_NAMES_ASKED, catalog.num_items), step)]


def _dense_levels_equal(trie: Trie, cells: int = 1 << 27) -> int:
    """How many levels fit a dense table, each found to hold the same edges as the sparse rows, and no other.

    Raises :class:`AssertionError` where one does not.
    """
    fitting = [level for level, size in enumerate(trie.sizes) if trie.num_nodes(level) * size <= cells]
    for level in fitting:
        table = trie.dense(level)
        node, code = np.nonzero(table >= 0)
        starts = np.searchsorted(node, np.arange(trie.num_nodes(level) + 1))
        if not (
            np.array_equal(starts, trie.child_start[level])
            and np.array_equal(code, trie.child_code[level])
            and np.array_equal(table[node, code], np.arange(len(code)))
        ):
            raise AssertionError(f"level {level}: the dense table and the sparse rows differ")
    return len(fitting)


def _timed(action: Callable[[], T]) -> tuple[T, float, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    value = action()
    return value, time.process_time() - cpu, time.perf_counter() - wall


def _peak_mb() -> float:
    """Peak resident set in megabytes."""
    status = Path("/proc/self/status")
    if not status.is_file():
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / 1e6 if sys.platform == "darwin" else peak * 1.024e-3
    # getrusage of a child begins with the peak of the process that started it.
    lines = status.read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1.024e-3


if __name__ == "__main__":
    task, result = map(Path, sys.argv[1:3])
    result.write_text(json.dumps(measure(json.loads(task.read_text())), indent=1))
