"""Known failures: excused until their date, then not; never excused silently, and never for ever."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from flashrec.errors import ConfigError
from flashrec_harness import cli, known_failures, runner
from flashrec_harness.outcome import Check, Outcome
from flashrec_harness.report import model

ENTRY = """
[[failure]]
suite = "parity"
check = "float32 against S*"
owner = "mei"
expires = 2026-12-31
reason = "SGLang drops the last beam"
"""
TODAY = datetime.date(2026, 12, 31)


def listed(tmp_path: Path, text: str = ENTRY) -> list[known_failures.KnownFailure]:
    path = tmp_path / "known-failures.toml"
    path.write_text(text)
    return known_failures.load(path)


def check(outcome: Outcome = Outcome.FAIL, name: str = "float32 against SGLang") -> Check:
    return Check("parity", name, outcome, "59 of 60", reason="rank 3 differs")


def judged(tmp_path: Path, one: Check, *, day: datetime.date = TODAY, text: str = ENTRY) -> list[Check]:
    known = listed(tmp_path, text)
    return [one, *known_failures.apply(known, "parity", [one], device="NVIDIA H200", today=day)]


def test_a_listed_failure_is_known_until_its_last_day(tmp_path: Path) -> None:
    (one,) = judged(tmp_path, check())
    assert one.outcome is Outcome.KNOWN
    assert one.reason == "rank 3 differs; known: mei, until 2026-12-31: SGLang drops the last beam"


def test_the_day_after_it_is_a_failure_again(tmp_path: Path) -> None:
    (one,) = judged(tmp_path, check(), day=TODAY + datetime.timedelta(days=1))
    assert one.outcome is Outcome.FAIL
    assert "has expired (mei, until 2026-12-31" in one.reason


def test_one_that_passes_is_stale_and_fails(tmp_path: Path) -> None:
    one, stale = judged(tmp_path, check(Outcome.PASS))
    assert one.outcome is Outcome.PASS
    assert stale.outcome is Outcome.FAIL
    assert "remove the entry" in stale.reason


@pytest.mark.parametrize("outcome", [Outcome.INVALID, Outcome.INCONCLUSIVE, Outcome.NOT_RUN])
def test_nothing_but_a_failure_is_excused(tmp_path: Path, outcome: Outcome) -> None:
    (one,) = judged(tmp_path, check(outcome))
    assert one.outcome is outcome


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("float32 against transformers", ENTRY),
        ("float32 against SGLang", ENTRY + 'device = "NVIDIA B200"'),
        ("float32 against SGLang", ENTRY.replace("parity", "perf")),
    ],
)
def test_other_checks_devices_and_suites_are_not_excused(tmp_path: Path, name: str, text: str) -> None:
    (one,) = judged(tmp_path, check(name=name), text=text)
    assert one.outcome is Outcome.FAIL


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('owner = "mei"', "", "failure 1: owner is missing"),
        ("expires = 2026-12-31", "", "failure 1: expires is missing"),
        ("2026-12-31", '"2026-12-31"', "expires must be a date such as 2027-01-31, without quotes"),
        ('owner = "mei"', 'owner = ""', "owner must be a text"),
        ("owner", "boss", "boss: unknown field"),
        ("[[failure]]", "[[failures]]", "failures: unknown"),
        ("[[failure]]", "[[failure", "known-failures.toml"),
        ("[[failure]]", "[failure]", "in two pairs of brackets"),
        (ENTRY, "failure = 3", "in two pairs of brackets"),
        (ENTRY, "failure = [3]", "in two pairs of brackets"),
    ],
)
def test_a_malformed_list_is_an_error_that_names_the_entry(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"known-failures\.toml") as error:
        listed(tmp_path, ENTRY.replace(old, new))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("outcome", "expires", "flags", "code"),
    [
        (Outcome.FAIL, "2999-12-31", [], 0),
        (Outcome.FAIL, "2999-12-31", ["--strict"], 1),
        (Outcome.FAIL, "2020-01-01", [], 1),
        (Outcome.PASS, "2999-12-31", [], 1),
    ],
)
def test_exit_codes_and_the_list_in_every_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: Outcome, expires: str, flags: list[str], code: int
) -> None:
    monkeypatch.chdir(tmp_path)
    listed(tmp_path, ENTRY.replace("2026-12-31", expires))
    monkeypatch.setattr(runner, "suite_function", lambda name: lambda context: [check(outcome)])
    (tmp_path / "model").mkdir()
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["parity", "--model-path", "model", *flags])
    assert exit_info.value.code == code
    report = model.load(Path("reports/latest"))
    assert [row["owner"] for row in report.known] == ["mei"]
    for name in ("report.html", "summary.md", "results.json"):
        assert "SGLang drops the last beam" in (Path("reports/latest") / name).read_text()
    excused = outcome is Outcome.FAIL and expires > "2026"
    assert ("KNOWN FAILURE: 1 of 1" in report.headline) == excused
    assert ("<skipped" in Path("reports/latest/junit.xml").read_text()) == excused
