"""A made trace taken apart, against numbers worked out by hand; and who holds a gap, against brute force."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_maker import LAYERS, TraceMaker, write

from flashrec_harness.tracing import analysis, decompose
from flashrec_harness.tracing import intervals as iv
from flashrec_harness.tracing.reader import Event, RawTrace, read_trace


@pytest.fixture
def made(tmp_path: Path) -> RawTrace:
    """Three waves; in each decode span the host spends 3 us in an expand span."""
    body = TraceMaker(waves=3).build()
    for decode in [event for event in body["traceEvents"] if event["name"] == "flashrec.decode"]:
        inner = decode | {"name": "flashrec.expand", "ts": decode["ts"] + 1, "dur": 3}
        body["traceEvents"].insert(0, inner)
    return read_trace(write(tmp_path, body))


def test_the_tree_nests_spans_and_tells_their_own_time(made: RawTrace) -> None:
    decode = decompose.span_tree(made).children["flashrec.decode"]
    (expand,) = decode.children.values()
    assert (expand.name, expand.count, expand.total_ms) == ("flashrec.expand", 3, pytest.approx(9e-3))
    assert decode.count == 3
    assert decode.own_ms == pytest.approx(decode.total_ms - 9e-3)
    rows = {str(row["span"]).strip(): row for row in decompose.tree_rows(made)}
    assert rows["flashrec.expand"]["of its parent"] == f"{9e-3 / decode.total_ms:.0%}"
    assert str(decompose.tree_rows(made)[0]["span"])[0] != "\u2003"


def test_waves_are_rows_with_what_the_host_did(made: RawTrace) -> None:
    rows = decompose.wave_rows(made)
    assert [row["wave"] for row in rows] == [1, 2, 3]
    prefill_kernels = len(TraceMaker().step_kernels())
    assert [(row["graphs"], row["eager launches"], row["stalls"]) for row in rows] == [(1, prefill_kernels, 1)] * 3
    lengths = [end - start for start, end in analysis.waves(made)]
    assert [row["ms"] for row in rows] == pytest.approx([length / 1e3 for length in lengths])
    assert all(
        row["busy"] == f"{analysis.duty_cycle(made, [wave]):.0%}"
        for row, wave in zip(rows, analysis.waves(made), strict=True)
    )
    assert len(decompose.wave_rows(made, count=2)) == 2


def test_all_idle_time_is_held_by_somebody(made: RawTrace) -> None:
    waves = analysis.waves(made)
    rows = decompose.gap_rows(made, waves)
    idle = sum(iv.length(iv.gaps(analysis.busy(made), wave)) for wave in waves)
    assert sum(float(str(row["total ms"])) for row in rows) == pytest.approx(idle / 1e3)
    assert {row["held by"] for row in rows} <= {"flashrec.prefill", "flashrec.finalize", "outside every span"}


def test_classes_add_up_to_all_kernel_time(made: RawTrace) -> None:
    rows = {row["class"]: row for row in decompose.class_rows(made)}
    passes = 3 * 3
    assert rows["fp8 gemm"]["kernels"] == passes * 4 * LAYERS
    assert rows["attention"]["kernels"] == passes * LAYERS
    total = sum(event["dur"] for event in made.device) / 1e3
    assert sum(float(str(row["total ms"])) for row in rows.values()) == pytest.approx(total)


def test_cadence_is_summed_up(made: RawTrace) -> None:
    (row,) = decompose.cadence_rows(made)
    assert row["steps"] == 3 * 2
    step = sum(length for _, length in TraceMaker().step_kernels()) / 1e3
    assert row["shortest ms"] == pytest.approx(step)


def nested(spans: list[tuple[int, int]]) -> list[Event]:
    """The spans that nest among ``spans``, as events of one thread."""
    kept: list[tuple[int, int]] = []
    for start, end in spans:
        if all(end <= s or start >= e or (s <= start and end <= e) or (start <= s and e <= end) for s, e in kept):
            kept.append((start, end))
    return [{"name": f"{start}-{end}", "ts": start, "dur": end - start} for start, end in dict.fromkeys(kept)]


def innermost(events: list[Event], window: tuple[int, int]) -> int | None:
    """Length of the shortest event that covers more than half of ``window``, by trying all."""
    low, high = window
    lengths = [
        event["dur"]
        for event in events
        if 2 * (min(event["ts"] + event["dur"], high) - max(event["ts"], low)) > high - low
    ]
    return min(lengths, default=None)


stretches = st.tuples(st.integers(0, 60), st.integers(1, 30)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(st.lists(stretches, max_size=12).map(nested), st.lists(stretches, max_size=6))
def test_the_holder_of_a_gap_is_the_innermost_event_around_it(
    events: list[Event], windows: list[tuple[int, int]]
) -> None:
    found: list[Any] = iv.holders(events, windows)
    assert [event and event["dur"] for event in found] == [innermost(events, window) for window in windows]
