"""``flashrec-harness catalogs``: random catalogs against the bounds of SPEC S3, from Parquet and from the cache."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashrec_harness.catalogs import filters
from flashrec_harness.catalogs.random_catalog import SIZES, write_parquet
from flashrec_harness.checkpoints.shapes import random_sids
from flashrec_harness.children import run_module
from flashrec_harness.outcome import Check, Outcome, SuiteContext

Figures = dict[str, Any]
_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """CPU seconds on one core, and megabytes (10^6 bytes); ``host_mb`` is the loading process's peak."""

    load_s: float
    device_mb: float
    host_mb: float
    cached_s: float


BOUNDS = {1_500_000: Bounds(2.0, 20.0, 2000.0, 0.5), 20_000_000: Bounds(40.0, 240.0, 2000.0, 3.0)}
"""What is promised at two sizes; :func:`bounds_for` scales SPEC S3's per-million figures for others."""


def bounds_for(sids: int) -> Bounds:
    millions = sids / 1e6
    return BOUNDS.get(sids) or Bounds(2.0 * max(millions, 1), 12 * max(millions, 1), 2000.0, 3.0)


def run(context: SuiteContext, sizes: Sequence[int]) -> list[Check]:
    """A check per size, and one per kind of filter; the catalogs and their cache are deleted again."""
    return [*(judge(sids, *measure(context, sids)) for sids in sizes), *filters.run(context)]


def measure(context: SuiteContext, sids: int) -> tuple[Figures, Figures]:
    """What loading a random catalog of ``sids`` SIDs took: read from its file, and then from the cache."""
    with tempfile.TemporaryDirectory(prefix="flashrec-catalogs-") as name:
        folder = Path(name)
        write_parquet(folder / "catalog.parquet", shuffled_sids(sids, context.seed))
        task = folder / "task.json"
        task.write_text(json.dumps({"catalog": str(folder / "catalog.parquet"), "cache_dir": str(folder / "cache")}))
        found = [_child(context, task, f"{sids}-{kind}") for kind in ("read", "cached")]
    return found[0], found[1]


def _child(context: SuiteContext, task: Path, name: str) -> Figures:
    context.out_dir.mkdir(parents=True, exist_ok=True)
    result = (context.out_dir / f"{name}.json").resolve()
    run_module(
        "flashrec_harness.catalogs.worker",
        [str(task), str(result)],
        log=context.out_dir / f"{name}.log",
        timeout_s=_TIMEOUT_S,
        env={"OMP_NUM_THREADS": "1"},
    )
    figures: Figures = json.loads(result.read_text())
    return figures


def shuffled_sids(count: int, seed: int) -> NDArray[np.int32]:
    """int32 ``[count, 3]``: distinct, uniformly random, in random order."""
    sids = random_sids(SIZES, count, seed)
    return sids[np.random.default_rng(seed).permutation(count)]


def judge(sids: int, read: Figures, cached: Figures) -> Check:
    """One check: every figure within its bound, and the same catalog from the file and from the cache."""
    bounds = bounds_for(sids)
    rows = [
        _row("Parquet to catalog, trie and index", read["load_cpu_s"], bounds.load_s, "s"),
        _row("the same from the cache", cached["load_cpu_s"], bounds.cached_s, "s"),
        _row("trie on a device", read["device_mb"], bounds.device_mb, "MB"),
        _row("peak of the process that reads", read["peak_mb"], bounds.host_mb, "MB"),
        _row("peak of the process that loads the cache", cached["peak_mb"], bounds.host_mb, "MB"),
    ]
    over = [str(row["what"]) for row in rows if not row["within"]]
    reason = f"over the bound: {', '.join(over)}" if over else ""
    if read["digest"] != cached["digest"] or sids != read["sids"] or sids != cached["sids"]:
        reason = "the cache holds another catalog than the file"
    summary = (
        f"read in {read['load_cpu_s']:.2f} s (trie alone {read['trie_cpu_s']:.2f}), from the cache in "
        f"{cached['load_cpu_s']:.2f} s; {read['device_mb']:.0f} MB on a device; host peak {read['peak_mb']:.0f} MB "
        f"({read['peak_before_mb']:.0f} before); 10,000 item names found in {1e3 * read['find_10000_items_cpu_s']:.1f} "
        f"ms; dense equals sparse on {read['dense_equals_csr']} levels. CPU seconds, one core"
    )
    outcome = Outcome.FAIL if reason else Outcome.PASS
    data = {"read": read, "cached": cached}
    return Check("catalogs", f"{sids:,} random SIDs", outcome, summary, reason=reason, rows=rows, data=data)


def _row(what: str, found: float, bound: float, unit: str) -> dict[str, Any]:
    return {"what": what, "found": round(found, 3), "bound": bound, "unit": unit, "within": found <= bound}
