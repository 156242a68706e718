"""Beam width x concurrency: a workload's cells as heat maps, one per gated metric."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from flashrec_harness.baselines import Samples
from flashrec_harness.outcome import Check, Grid, Outcome
from flashrec_harness.perf.rounds import GATED, UNITS
from flashrec_harness.perf.workload import Cell, Workload

Place = tuple[int, int]
"""Beam width and concurrency."""


def matrices(workload: Workload) -> list[dict[Place, Cell]]:
    """Groups of cells that differ in width, concurrency and round size alone, and vary both of the first two."""
    groups: dict[tuple[object, ...], dict[Place, Cell]] = {}
    for cell in workload.cells:
        common = (cell.context, cell.drive, cell.cache, cell.rate, cell.target_ms, cell.max_tokens)
        groups.setdefault(common, {})[cell.n, cell.concurrency] = cell
    return [group for group in groups.values() if all(len(set(axis)) > 1 for axis in zip(*group, strict=True))]


def check(workload: Workload, samples: Samples) -> list[Check]:
    """One check per matrix; figures, not a verdict: the baseline and paired rounds judge each cell."""
    found = []
    for group in matrices(workload):
        throughput = [statistics.median(samples[cell.name]["throughput"]) for cell in group.values()]
        some = next(iter(group.values()))
        prompts = "histories" if some.context is None else f"context {some.context}"
        found.append(
            Check(
                "perf",
                f"beam x concurrency, {prompts}, {some.cache}, {some.drive}",
                Outcome.PASS,
                f"{len(group)} cells, {min(throughput):.4g} to {max(throughput):.4g} req/s",
                grids=[_grid(metric, group, samples) for metric in GATED],
            )
        )
    return found


def _grid(metric: str, group: Mapping[Place, Cell], samples: Samples) -> Grid:
    widths, at_once = (sorted(set(axis)) for axis in zip(*group, strict=True))

    def value(place: Place) -> float | None:
        return statistics.median(samples[group[place].name][metric]) if place in group else None

    values = [[value((n, c)) for c in at_once] for n in widths]
    title = f"{metric.removesuffix('_ms')}, {UNITS[metric]}"
    return Grid(title, "n", "at once", [str(n) for n in widths], [str(c) for c in at_once], values)
