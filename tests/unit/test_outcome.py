"""Outcomes, exit codes and headlines: what is not a pass must never look like one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrec_harness.outcome import Check, ExitCode, Outcome, exit_code, headline, worst


def check(outcome: Outcome) -> Check:
    return Check("suite", "name", outcome, "summary")


outcomes = st.lists(st.sampled_from(Outcome), max_size=8)


@pytest.mark.parametrize(
    ("found", "strict", "expected"),
    [
        ([Outcome.PASS], False, ExitCode.OK),
        ([Outcome.PASS, Outcome.NOT_RUN], False, ExitCode.OK),
        ([Outcome.PASS, Outcome.NOT_RUN], True, ExitCode.FAILED),
        ([Outcome.PASS, Outcome.INVALID], False, ExitCode.UNDECIDED),
        ([Outcome.PASS, Outcome.INCONCLUSIVE], False, ExitCode.UNDECIDED),
        ([Outcome.FAIL, Outcome.INVALID], False, ExitCode.FAILED),
        ([Outcome.PASS, Outcome.KNOWN], False, ExitCode.OK),
        ([Outcome.PASS, Outcome.KNOWN], True, ExitCode.FAILED),
        ([], False, ExitCode.UNDECIDED),
    ],
)
def test_exit_codes(found: list[Outcome], strict: bool, expected: ExitCode) -> None:
    assert exit_code([check(outcome) for outcome in found], strict=strict) == expected


def test_exit_codes_are_the_documented_numbers() -> None:
    assert [int(code) for code in ExitCode] == [0, 1, 2, 4]


@given(outcomes)
def test_exit_code_is_zero_only_if_nothing_is_red(found: list[Outcome]) -> None:
    harmless = {Outcome.PASS, Outcome.NOT_RUN, Outcome.KNOWN}
    assert (exit_code([check(o) for o in found]) == 0) == (bool(found) and set(found) <= harmless)


@given(outcomes)
def test_headline_says_incomplete_and_how_many_when_something_is_not_run(found: list[Outcome]) -> None:
    text = headline([check(outcome) for outcome in found])
    missing = found.count(Outcome.NOT_RUN)
    assert (f"INCOMPLETE: {missing} of {len(found)} not run" in text) == (missing > 0 or not found)
    assert text.startswith("PASS") == (bool(found) and set(found) == {Outcome.PASS})


def test_headline_starts_with_the_gravest() -> None:
    text = headline([check(o) for o in (Outcome.PASS, Outcome.NOT_RUN, Outcome.INVALID, Outcome.FAIL)])
    assert text == "FAIL: 1 of 4, INVALID: 1 of 4, INCOMPLETE: 1 of 4 not run, passed: 1 of 4"


def test_worst_of_nothing_is_not_run() -> None:
    assert worst([]) is Outcome.NOT_RUN
    assert worst([Outcome.PASS, Outcome.NOT_RUN]) is Outcome.NOT_RUN
    assert worst([Outcome.INVALID, Outcome.FAIL, Outcome.INCONCLUSIVE]) is Outcome.FAIL
