"""The acceptance list: a line is no better than the checks it rests on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flashrec_harness import acceptance
from flashrec_harness.outcome import Check, Outcome, headline

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


class Interrupted:
    """A session whose third suite is ended from the keyboard."""

    interrupted = False

    def __init__(self) -> None:
        self.asked: list[str] = []

    def run(self, suite: str, function: object) -> list[Check]:
        self.asked.append(suite)
        if len(self.asked) == 3:
            raise KeyboardInterrupt
        return [Check(suite, f"{suite} check", Outcome.PASS, "fine")]


def test_what_was_judged_before_an_interruption_stays() -> None:
    session: Any = Interrupted()
    found, judged = acceptance.run(session, without=["perf"])
    assert session.asked == list(acceptance.ORDER[:3])
    assert session.interrupted
    assert [checks[0].outcome for checks in found.values()] == [Outcome.PASS] * 2 + [Outcome.NOT_RUN] * 5
    assert found["parity"][0].reason.startswith("interrupted after ")
    assert found["trace"][0].reason == "interrupted"
    assert [line.outcome for line in judged] == [Outcome.PASS] + [Outcome.NOT_RUN] * 6


def test_the_headline_tells_what_ran_in_part_from_what_did_not() -> None:
    missing = Check("parity", "against SGLang", Outcome.NOT_RUN, "", reason="no server")
    partly = [acceptance.judge(line, suites(parity=[*suites()["parity"], missing])) for line in acceptance.LINES]
    assert headline(partly) == "INCOMPLETE: 1 of 7 run in part, 1 of 7 not run, passed: 5 of 7"  # no FP8 check
    assert headline([partly[1]]) == "INCOMPLETE: 1 of 1 run in part"
