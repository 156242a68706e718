"""The verdict's own rules: the bound, what makes an axis invalid, and what a process report must survive."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from random_shop import MakeTask

from flashrec import Beam
from flashrec_harness.determinism.judge import drift_bound, judge
from flashrec_harness.determinism.records import (
    Observation,
    ProcessReport,
    bits_float,
    float_bits,
    output_beams,
    output_digest,
)
from flashrec_harness.outcome import Check, Outcome

BEAMS = output_beams([Beam((5, 6), -0.5, -0.25, "stop"), Beam((5, 7), -0.75, -0.375, "stop")])
OTHER = output_beams([Beam((5, 6), math.nextafter(-0.5, 0), -0.25, "stop"), Beam((5, 7), -0.75, -0.375, "stop")])


def report(process: int, waves: int, axis: str = "mixed", /, **witness: int) -> ProcessReport:
    """A process that saw the same output in every wave; without a witness each of them was one wave."""
    digest = output_digest(BEAMS)
    seen = [Observation(axis, f"wave {wave}", "default", digest, "", 9, 3, 1, 0) for wave in range(waves)]
    return ProcessReport(
        process, str(process), 1, "cpu", seen, {digest: BEAMS}, {"": []}, {}, {axis: witness or {"waves": waves}}
    )


def only(checks: list[Check]) -> Check:
    return next(check for check in checks if not check.name.startswith("ledgers"))


def drift(one: ProcessReport, beams: tuple = OTHER) -> None:  # type: ignore[type-arg]
    digest = output_digest(beams)
    one.outputs[digest] = beams
    one.observations[-1] = replace(one.observations[-1], output=digest)


def test_the_bound_is_what_chance_leaves() -> None:
    for waves in (1, 30, 120, 1000):
        rate = drift_bound(waves)
        assert (1 - rate) ** waves == pytest.approx(0.05)
        assert rate <= 3 / waves
    assert drift_bound(0) == 1


def test_one_flipped_score_bit_in_one_wave_is_a_failure(make_task: MakeTask) -> None:
    reports = [report(process, 30) for process in range(4)]
    assert only(judge(reports, [make_task("mixed")])).outcome is Outcome.PASS
    flipped = (replace(BEAMS[0], cumulative_bits="010000bf"), BEAMS[1])
    drift(reports[3], flipped)
    check = only(judge(reports, [make_task("mixed")]))
    assert check.outcome is Outcome.FAIL
    assert "1 of 120 differ" in check.summary
    assert "process 3, wave 29: rank 1: score bits 000000bf became 010000bf" in check.reason


def test_a_difference_below_float32_is_none() -> None:
    assert output_digest(OTHER) == output_digest(BEAMS)


@pytest.mark.parametrize(("processes", "waves"), [(4, 29), (3, 40)])
def test_too_few_waves_or_processes_are_invalid(processes: int, waves: int, make_task: MakeTask) -> None:
    check = only(judge([report(process, waves) for process in range(processes)], [make_task("mixed")]))
    assert check.outcome is Outcome.INVALID


@pytest.mark.parametrize(("shared", "outcome"), [(0, Outcome.INVALID), (29, Outcome.INVALID), (30, Outcome.PASS)])
def test_requests_that_did_not_share_a_wave_do_not_count(shared: int, outcome: Outcome, make_task: MakeTask) -> None:
    reports = [report(process, 30, waves=30 if process else shared) for process in range(4)]
    check = only(judge(reports, [make_task("mixed")]))
    assert check.outcome is outcome
    assert check.name == f"same bits in {90 + shared} mixed waves of 4 processes"
    assert check.data["bound"] == drift_bound(90 + shared)
    if outcome is Outcome.INVALID:
        assert f"the requests of {30 - shared} of 120 turns did not share one wave" in check.reason


def test_equal_hash_seeds_are_invalid(make_task: MakeTask) -> None:
    reports = [report(process, 30) for process in range(4)]
    for one in reports:
        one.hash_seed = "0"
    assert only(judge(reports, [make_task("mixed")])).outcome is Outcome.INVALID


def test_a_warm_axis_without_a_hit_is_invalid(make_task: MakeTask) -> None:
    task = replace(make_task(), axes=("cache",))
    events = {"cold runs": 1, "warm runs": 1, "partly warm runs": 1}
    assert only(judge([report(0, 3, "cache", **events)], [task])).outcome is Outcome.PASS
    check = only(judge([report(0, 3, "cache", **(events | {"warm runs": 0}))], [task]))
    assert check.outcome is Outcome.INVALID
    assert "never happened: warm runs" in check.reason


def test_a_bucket_that_no_wave_filled_makes_the_axis_invalid(make_task: MakeTask) -> None:
    task = replace(make_task(), axes=("buckets",))
    check = only(judge([report(0, 3, "buckets", waves=3)], [task]))
    assert check.outcome is Outcome.INVALID
    assert "bucket 64" in check.reason
    assert "65 rows" in check.reason


def test_a_forbidden_event_is_a_failure(make_task: MakeTask) -> None:
    task = replace(make_task(), axes=("cache off",))
    assert only(judge([report(0, 2, "cache off", waves=2, hits=16)], [task])).outcome is Outcome.FAIL


def test_a_report_survives_its_file(tmp_path: Path) -> None:
    one = report(2, 3, waves=3)
    one.write(tmp_path / "report.json")
    assert ProcessReport.read(tmp_path / "report.json") == one


@pytest.mark.parametrize("value", [-0.0, 0.1, -3.4028234663852886e38, 1e-45])
def test_score_bits_are_exact(value: float) -> None:
    assert float_bits(bits_float(float_bits(value))) == float_bits(value)
