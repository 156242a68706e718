"""The acceptance list: a line is no better than the checks it rests on."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashrec_harness import acceptance
from flashrec_harness.outcome import Check, Outcome

SUITES = ("unit", "kernel", "parity", "determinism", "eval", "trace", "perf")


def suites(**changes: list[Check]) -> dict[str, list[Check]]:
    return {name: [Check(name, f"{name} check", Outcome.PASS, "fine")] for name in SUITES} | changes


def lines(**changes: list[Check]) -> list[Outcome]:
    return [acceptance.judge(line, suites(**changes)).outcome for line in acceptance.LINES]


def test_the_seven_lines_in_order() -> None:
    words = ["tests", "scores", "120", "replay", "FP8 GEMMs", "recommend", "baseline"]
    assert all(word in line.name for word, line in zip(words, acceptance.LINES, strict=True))


@pytest.mark.parametrize(
    ("suite", "line"),
    [("unit", 0), ("kernel", 0), ("parity", 1), ("determinism", 2), ("trace", 3), ("eval", 5), ("perf", 6)],
)
def test_a_red_check_turns_its_line_red_and_no_other(suite: str, line: int) -> None:
    fp8 = Check("trace", "FP8 GEMMs are FP8", Outcome.PASS, "fine")
    red = Check(suite, "red", Outcome.FAIL, "seen", reason="why", repeat="again")
    changes = {"trace": [*suites()["trace"], fp8]}
    changes[suite] = [*changes.get(suite, suites()[suite]), red]
    found = lines(**changes)
    assert [index for index, outcome in enumerate(found) if outcome is Outcome.FAIL] == [line]
    judged = acceptance.judge(acceptance.LINES[line], suites(**changes))
    assert (judged.reason, judged.repeat) == ("red: why", "again")


def test_fp8_has_a_line_of_its_own() -> None:
    found = lines(trace=[Check("trace", "FP8 GEMMs are FP8", Outcome.NOT_RUN, "", reason="no GPU")])
    assert found[4] is Outcome.NOT_RUN
    assert found[3] is Outcome.NOT_RUN, "no other trace check ran, so the graph line shows nothing either"


@pytest.mark.parametrize(
    "reason", ["no baseline for this device", "comparison refused: cell 0 n: baseline 10, this run 64"]
)
def test_a_baseline_is_recorded_only_where_one_was_compared_with(reason: str) -> None:
    figures = Check("perf", "figures n=10", Outcome.PASS, "100 req/s")
    missing = Check("perf", "against baseline", Outcome.NOT_RUN, "", reason=reason)
    line = acceptance.judge(acceptance.LINES[6], suites(perf=[figures, missing]))
    assert line.outcome is Outcome.NOT_RUN
    assert reason in line.reason
    assert lines(perf=[figures, Check("perf", "against baseline n=10", Outcome.FAIL, "slower")])[6] is Outcome.FAIL
    assert lines(perf=[figures, Check("perf", "against baseline n=10", Outcome.PASS, "equal")])[6] is Outcome.PASS


def test_digests_that_nobody_has_stored_take_nothing_from_the_line_on_bits() -> None:
    drift = Check("determinism", "same bits", Outcome.PASS, "120 runs")
    golden = Check("determinism", "golden digests", Outcome.NOT_RUN, "", reason="none stored")
    assert lines(determinism=[drift, golden])[2] is Outcome.PASS
    assert lines(determinism=[golden])[2] is Outcome.NOT_RUN


JUNIT = """<testsuites><testsuite>{cases}</testsuite></testsuites>"""
PASSED = '<testcase classname="t" name="a"/>'
FAILED = '<testcase classname="t" name="b"><failure message="x"/></testcase>'
SKIPPED = '<testcase classname="t" name="c"><skipped message="x"/></testcase>'


@pytest.mark.parametrize(
    ("cases", "error", "outcome", "words"),
    [
        ([PASSED, SKIPPED], "", Outcome.PASS, "1 passed, 0 failed, 1 skipped"),
        ([PASSED, FAILED, FAILED], "pytest: exit code 1", Outcome.FAIL, "t.b failed and 1 more"),
        ([SKIPPED], "", Outcome.FAIL, "no test ran"),
        ([PASSED], "pytest: exit code 1; log", Outcome.FAIL, "pytest: exit code 1"),
        (None, "pytest: exit code 4", Outcome.INVALID, "pytest: exit code 4"),
    ],
)
def test_a_pytest_session_as_a_check(
    tmp_path: Path, cases: list[str] | None, error: str, outcome: Outcome, words: str
) -> None:
    report = tmp_path / "pytest.xml"
    if cases is not None:
        report.write_text(JUNIT.format(cases="".join(cases)))
    check = acceptance.judge_junit(report, error, repeat="pytest")
    assert check.outcome is outcome
    assert words in check.reason + check.summary


def test_unit_tests_are_found_from_anywhere_in_a_checkout_and_nowhere_else(tmp_path: Path) -> None:
    unit = tmp_path / "checkout" / "tests" / "unit"
    unit.mkdir(parents=True)
    (tmp_path / "checkout" / "pyproject.toml").touch()
    assert acceptance.unit_test_folder(tmp_path / "checkout" / "tests") == unit
    assert acceptance.unit_test_folder(tmp_path) is None
