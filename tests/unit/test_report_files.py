"""The files of a run: places, ``latest``, Markdown, JUnit, the GitHub summary."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from report_samples import checks, report
from rich.console import Console

from flashrec.errors import ConfigError
from flashrec_harness.outcome import Check, ExitCode, Outcome
from flashrec_harness.report import comparison, junit, markdown, model, terminal, writer

FILES = {"report.html", "summary.md", "results.json", "junit.xml", "env.json"}


def test_every_suite_and_the_run_have_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    directory = writer.write(report(), tmp_path)
    for folder in (directory, directory / "parity", directory / "perf"):
        assert {path.name for path in folder.iterdir()} >= FILES
    assert json.loads((directory / "env.json").read_text())["hard"] == {"device": "NVIDIA H200"}
    assert model.load(tmp_path / "latest") == report()
    assert set(model.load(directory / "perf").suites) == {"perf"}


def test_latest_moves_to_the_newest_run(tmp_path: Path) -> None:
    writer.write(report(), tmp_path)
    writer.write(replace(report(), run_id="20261130-000000-x"), tmp_path)
    assert (tmp_path / "latest").readlink() == Path("20261130-000000-x")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_step_summary_is_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "summary"
    target.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(target))
    writer.write(report(), tmp_path / "reports")
    assert target.read_text().startswith("before\n## FlashRec accept: FAIL: 1 of 6")


def test_markdown_tables_survive_pipes_and_newlines() -> None:
    text = markdown.render(report({"s": [Check("s", "a|b", Outcome.FAIL, "one\ntwo", reason="x|y")]}))
    row = next(line for line in text.splitlines() if line.startswith("| a"))
    assert row == r"| a\|b | ❌ **fail** | x\|y. one two |"


def test_markdown_repeats_only_what_is_red() -> None:
    text = markdown.render(report())
    assert "--seed 7" in text
    assert "not run" in text
    assert text.rstrip().endswith("python -m flashrec_harness accept --quick\n```")


def test_junit_maps_outcomes() -> None:
    root = ET.fromstring(junit.render(report()))
    parity, perf = root.findall("testsuite")
    assert (parity.get("tests"), parity.get("failures")) == ("2", "1")
    assert (perf.get("errors"), perf.get("skipped"), perf.get("tests")) == ("2", "1", "4")
    skipped = perf.find("testcase/skipped")
    assert skipped is not None
    assert skipped.get("message") == "no baseline for this device"
    failure = parity.find("testcase/failure")
    assert failure is not None
    assert "--seed 7" in (failure.text or "")


def test_terminal_shows_verdict_reasons_and_repeat() -> None:
    out = StringIO()
    terminal.show(report(), Console(file=out, width=150), directory=Path("reports/x"))
    text = out.getvalue()
    assert "FAIL: 1 of 6" in text
    assert "rank 3 differs" in text
    assert "--seed 7" in text
    assert "reports/x/report.html" in text


def test_brackets_in_what_is_shown_are_no_markup() -> None:
    reason = "see issue [/x] and [issue 7] for it"
    out = StringIO()
    Console(file=out, width=150).print(terminal.rows_table("[red]title", [{"[b]reason": reason, "count": 3}]))
    assert reason in out.getvalue()
    assert "[red]title" in out.getvalue()
    assert "[b]reason" in out.getvalue()


def test_two_runs_of_one_second_have_a_folder_each(tmp_path: Path) -> None:
    assert [writer.claim(tmp_path / "reports", "20261129-194200-abc") for _ in range(3)] == [
        "20261129-194200-abc", "20261129-194200-abc-2", "20261129-194200-abc-3",
    ]  # fmt: skip
    assert len(list((tmp_path / "reports").iterdir())) == 3


def test_where_no_run_can_be_kept_is_said_before_anything_is_judged(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=f"{root}: cannot hold reports: Not a directory"):
            writer.claim(root, "run")
    (tmp_path / "unpacked" / "latest").mkdir(parents=True)
    with pytest.raises(ConfigError, match="latest: a directory, where each run leaves a link"):
        writer.claim(tmp_path / "unpacked", "run")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 1}', '{"schema": 2}', "\udcff"])
def test_a_damaged_report_is_the_user_s_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "results.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=r"results\.json: not a report that can be read"):
        model.load(tmp_path)


@pytest.mark.parametrize(
    ("before", "after", "code"),
    [
        (Outcome.INCONCLUSIVE, Outcome.FAIL, ExitCode.FAILED),
        (Outcome.INVALID, Outcome.FAIL, ExitCode.FAILED),
        (Outcome.NOT_RUN, Outcome.INVALID, ExitCode.FAILED),
        (Outcome.PASS, Outcome.INCONCLUSIVE, ExitCode.FAILED),
        (Outcome.FAIL, Outcome.INVALID, ExitCode.OK),
        (Outcome.INVALID, Outcome.INCONCLUSIVE, ExitCode.OK),
        (Outcome.FAIL, Outcome.NOT_RUN, ExitCode.OK),
    ],
)
def test_compare_fails_where_a_check_is_worse(before: Outcome, after: Outcome, code: ExitCode) -> None:
    runs = [report({"parity": [Check("parity", "one", outcome, "")]}) for outcome in (before, after)]
    assert comparison.show(*runs, Console(file=StringIO())) is code


def test_compare_shows_the_median_of_an_even_number_of_processes() -> None:
    def run(values: list[float]) -> model.RunReport:
        data = {"cell": "n=10", "samples": {"throughput": values}}
        return report({"perf": [Check("perf", "figures", Outcome.PASS, "", data=data)]})

    (row,) = comparison.changed_figures(run([100.0, 110.0, 110.0, 100.0]), run([210.0, 210.0]))
    assert (row["before"], row["after"], row["change %"]) == (105.0, 210.0, pytest.approx(100.0))


def test_runs_that_have_no_check_in_common_are_not_compared() -> None:
    parity, perf = (report({suite: checks()[suite]}) for suite in ("parity", "perf"))
    with pytest.raises(ConfigError, match=r"no check in common \(parity and perf\): name two runs of one suite"):
        comparison.show(parity, perf, Console(file=StringIO()))


def test_compare_names_what_changed_and_fails_only_on_new_red() -> None:
    before, after = report(), report()
    after.suites = checks()
    after.suites["parity"][0].outcome = Outcome.FAIL
    after.environment.hard["device"] = "NVIDIA H100"
    out = StringIO()
    assert comparison.show(before, after, Console(file=out, width=150)) is ExitCode.FAILED
    assert "float32 against transformers" in out.getvalue()
    assert "NVIDIA H100" in out.getvalue()
    assert comparison.show(after, before, Console(file=StringIO())) is ExitCode.OK
    assert comparison.changed_outcomes(before, before) == []
