"""A workload's published figures beside the measured ones: how far above others, how far below the hardware's floor."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flashrec_harness.outcome import Check, Outcome
from flashrec_harness.perf.workload import Cell, Workload

SUITE = "perf"
BAR, FLOOR = "bar", "floor"
"""Names of anchors that mean something here: what must be reached, and what the hardware's arithmetic allows."""

Samples = Mapping[str, Mapping[str, Sequence[float]]]
"""Cell name -> metric -> process medians."""


def check(workload: Workload, samples: Samples, device: str) -> list[Check]:
    """Every cell with published figures as a row, in requests per second; red where a bar was missed.

    Bars hold on the device that they were set for: on another the figures are shown and the verdict is *not run*.
    """
    cells = [cell for cell in workload.cells if cell.anchor]
    if not cells:
        return []
    rows = [_row(cell, statistics.median(samples[cell.name]["throughput"])) for cell in cells]
    barred = [row for row in rows if BAR in row]
    missed = [row for row in barred if row["to the bar"] < 1]
    name = "published figures"
    summary = f"{len(barred) - len(missed)} of {len(barred)} bars reached" if barred else f"{len(rows)} cells"
    shown: dict[str, Any] = {"rows": rows, "printed": True}
    if barred and device != workload.anchor_device:
        reason = f"the bars are of an {workload.anchor_device}, this is an {device}"
        return [Check(SUITE, name, Outcome.NOT_RUN, "", reason=reason, **shown)]
    outcome = Outcome.FAIL if missed else Outcome.PASS
    return [Check(SUITE, name, outcome, summary, reason=_short(missed), **shown)]


def _row(cell: Cell, throughput: float) -> dict[str, Any]:
    point = {"context": cell.context, "n": cell.n, "at once": cell.concurrency, "this engine": round(throughput, 1)}
    row = point | dict(cell.anchor)
    if BAR in cell.anchor:
        row["to the bar"] = round(throughput / cell.anchor[BAR], 3)
    if FLOOR in cell.anchor:
        row["of the floor"] = round(throughput / cell.anchor[FLOOR], 3)
    return row


def _short(missed: Iterable[Mapping[str, Any]]) -> str:
    return "; ".join(
        f"{row['at once']} x {row['context']}, n={row['n']}: {row['this engine']} of {row[BAR]:g} req/s"
        for row in missed
    )
