"""Published figures: rows beside the measured ones, and bars that hold on their own device."""

from __future__ import annotations

from flashrec_harness.outcome import Outcome
from flashrec_harness.perf import published
from flashrec_harness.perf.workload import Cell, Workload, load_workload

GPU = "NVIDIA H200"
FAST = Cell(n=50, context=2465, anchor={"bar": 70, "floor": 140})
WIDE = Cell(n=512, context=2465, concurrency=8, anchor={"other engine": 12.2, "bar": 70, "floor": 100})
WORKLOAD = Workload(name="anchors", cells=(FAST, WIDE, Cell(n=7)), anchor_device=GPU)


def samples(fast: float, wide: float) -> dict[str, dict[str, list[float]]]:
    by_cell = {FAST.name: fast, WIDE.name: wide, WORKLOAD.cells[2].name: 1.0}
    return {name: {"throughput": [value - 1, value, value + 5]} for name, value in by_cell.items()}


def test_a_missed_bar_is_red_and_named() -> None:
    (check,) = published.check(WORKLOAD, samples(77.0, 63.0), GPU)
    assert check.outcome is Outcome.FAIL
    assert check.summary == "1 of 2 bars reached"
    assert check.reason == "8 x 2465, n=512: 63.0 of 70 req/s"
    assert check.printed
    assert check.rows[0] == {
        "context": 2465,
        "n": 50,
        "at once": 1,
        "this engine": 77.0,
        "bar": 70,
        "floor": 140,
        "to the bar": 1.1,
        "of the floor": 0.55,
    }
    assert check.rows[1]["other engine"] == 12.2
    assert len(check.rows) == 2


def test_all_bars_reached_is_green() -> None:
    (check,) = published.check(WORKLOAD, samples(70.0, 70.0), GPU)
    assert check.outcome is Outcome.PASS
    assert check.summary == "2 of 2 bars reached"


def test_another_device_is_shown_and_not_judged() -> None:
    (check,) = published.check(WORKLOAD, samples(7.0, 6.0), "another GPU")
    assert check.outcome is Outcome.NOT_RUN
    assert "another GPU" in check.reason
    assert check.rows[0]["to the bar"] == 0.1


def test_no_published_figures_no_check() -> None:
    workload = Workload(name="plain", cells=(Cell(n=7),))
    assert published.check(workload, samples(1.0, 1.0), GPU) == []


def test_every_anchor_cell_has_a_bar_and_a_floor_on_a_named_device() -> None:
    workload = load_workload("anchors")
    assert workload.anchor_device
    assert all({"bar", "floor"} <= set(cell.anchor) for cell in workload.cells)
