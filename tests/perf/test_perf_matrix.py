"""Beam x concurrency: which cells make a matrix, and the heat map that a reader sees."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from flashrec_harness.environment import Commit, Environment
from flashrec_harness.outcome import Check, Grid, Outcome
from flashrec_harness.perf import matrix
from flashrec_harness.perf.workload import Cell, Workload, load_workload
from flashrec_harness.report import grid, html, model
from flashrec_harness.report.model import RunReport


def report(check: Check) -> RunReport:
    now = datetime(2026, 11, 30, tzinfo=UTC)
    return RunReport("run", "perf", "command", now, 1.0, Environment(Commit("", False)), {"perf": [check]})


def samples(workload: Workload) -> dict[str, dict[str, list[float]]]:
    return {
        cell.name: {
            "throughput": [100.0 * cell.concurrency / cell.n] * 3,
            "p50_ms": [float(cell.n)] * 3,
            "p99_ms": [2.0 * cell.n] * 3,
        }
        for cell in workload.cells
    }


def test_the_matrix_workload_is_one_matrix_and_the_quick_one_none() -> None:
    (group,) = matrix.matrices(load_workload("matrix"))
    assert {n for n, _ in group} == {1, 10, 50, 256}
    assert matrix.matrices(load_workload("quick")) == []


def test_cells_of_another_prompt_length_are_a_matrix_of_their_own() -> None:
    places = [(n, c, context) for n in (1, 2) for c in (1, 2) for context in (10, 20)]
    cells = tuple(Cell(n=n, concurrency=c, context=context) for n, c, context in places)
    assert [len(group) for group in matrix.matrices(Workload(name="w", cells=cells))] == [4, 4]


def test_a_cell_that_was_not_measured_is_a_dash_and_the_highest_is_the_darkest() -> None:
    workload = load_workload("matrix")
    (check,) = matrix.check(workload, samples(workload))
    assert check.outcome is Outcome.PASS
    throughput = check.grids[0]
    assert throughput.rows == ["1", "10", "50", "256"]
    assert throughput.columns == ["1", "8", "32"]
    assert throughput.values[0][2] == 3200.0
    assert throughput.values[3][2] is None
    page = html.render(report(check))
    table = page[page.index("<figcaption>throughput") :]
    shades = [int(shade) for shade in re.findall(r"var\(--c0\) (\d+)%", table[: table.index("</table>")])]
    assert (max(shades), min(shades), shades.index(max(shades))) == (46, 0, 2)
    assert table[: table.index("</table>")].count("–") == 1
    again = model.from_json(model.to_json(report(check)))
    assert again.suites["perf"][0].grids[0] == throughput


def test_differences_that_are_noise_stay_pale() -> None:
    near = Grid("t", "n", "at once", ["1"], ["1", "8"], [[100.0, 101.0]])
    assert [int(shade) for shade in re.findall(r"var\(--c0\) (\d+)%", grid.render(near))] == [0, 1]
    assert "–" in grid.render(Grid("t", "n", "c", ["1"], ["1"], [[None]]))
