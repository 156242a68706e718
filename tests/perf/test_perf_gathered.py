"""A baseline written from sessions that others measured: which are taken, which are left out, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashrec.errors import ConfigError
from flashrec_harness import baselines, cli, stats
from flashrec_harness.baselines import BaselineError
from flashrec_harness.perf import gathered, history

SHA = "c0ffee" * 6 + "abcd"
CELL = "n=50"


class Reports:
    """A folder of reports with session files as ``perf`` leaves them."""

    def __init__(self, root: Path) -> None:
        self.root, self.folder, self.baselines = root, root / "reports", root / "baselines"

    def add(self, run_id: str, throughput: list[float], boot: str, **changes: Any) -> Path:
        hard = {"device": "NVIDIA H200", "model": "aa"} | changes.pop("hard", {})
        commit = {"sha": SHA, "dirty": False, "subject": "", "when": ""} | changes.pop("commit", {})
        samples = {CELL: {"throughput": throughput, "p50_ms": [1e3 / value for value in throughput]}}
        session = {"run_id": run_id, "commit": commit["sha"], "boot_id": boot, "samples": samples, "rounds": {}}
        where = {"commit": commit, "hard": hard, "soft": {"torch": "2.11"}, "info": {}}
        body = {"workload": "anchors", "valid": True, "environment": where, "session": session} | changes
        path = self.folder / run_id / "perf" / history.SESSION_FILE
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(body))
        return path

    def write(self, **options: Any) -> gathered.Written:
        return gathered.write("anchors", self.folder, self.baselines, **{"reason": "why"} | options)


@pytest.fixture
def reports(tmp_path: Path) -> Reports:
    """Three sessions of three machines, 2 % apart."""
    reports = Reports(tmp_path)
    for number, centre in enumerate((98.0, 100.0, 102.0)):
        reports.add(f"run-{number}", [centre, centre, centre], f"boot-{number}")
    return reports


def test_sessions_of_several_machines_make_one_baseline(reports: Reports) -> None:
    """The band holds what the machines differ by: 2 sd of the sessions' logs, times sqrt(1 + 1/3)."""
    found = reports.write()
    assert found.path == reports.baselines / "nvidia-h200" / "anchors.json"
    stored = baselines.load(found.path)
    assert [session.run_id for session in stored.sessions] == ["run-0", "run-1", "run-2"]
    assert stored.boots == 3
    assert stored.history == [{"commit": SHA, "reason": "why", "run_id": "run-2"}]
    summary = stored.summary()[CELL]["throughput"]
    assert summary["centre"] == pytest.approx((98 * 100 * 102) ** (1 / 3), rel=1e-5)
    assert summary["band"] == pytest.approx(2 * 0.0200015 * (4 / 3) ** 0.5, rel=1e-3)
    assert stats.percent(summary["band"]) > 4
    assert not found.left_out


def test_a_copy_of_a_run_counts_once(reports: Reports) -> None:
    """``latest`` is a link; an archive of the reports holds the run twice."""
    shutil.copytree(reports.folder / "run-2", reports.folder / "latest")
    assert [session.run_id for session in reports.write().sessions] == ["run-0", "run-1", "run-2"]


def test_what_is_left_out_is_said(reports: Reports) -> None:
    reports.add("a-other-commit", [50.0, 50.0], "boot", commit={"sha": "beef" * 10})
    reports.add("b-dirty", [50.0, 50.0], "boot", commit={"dirty": True})
    reports.add("c-other-model", [50.0, 50.0], "boot", hard={"model": "bb"})
    reports.add("d-invalid", [50.0, 50.0], "boot", valid=False)
    reports.add("e-other-workload", [50.0, 50.0], "boot", workload="serving")
    found = reports.write()
    assert len(found.sessions) == 3
    assert found.left_out == {"commit beefbeefb": 1, "the tree was dirty": 1, "model": 1}


def test_the_newest_session_says_what_is_written_unless_a_commit_is_named(reports: Reports) -> None:
    for number in range(3):
        reports.add(f"zz-{number}", [200.0, 200.0, 200.0], "boot", commit={"sha": "beef" * 10})
    assert [session.run_id for session in reports.write(commit="c0ffee").sessions] == ["run-0", "run-1", "run-2"]
    assert [session.run_id for session in reports.write(accept_wider=True).sessions] == ["zz-0", "zz-1", "zz-2"]


def _too_few(reports: Reports) -> None:
    shutil.rmtree(reports.folder / "run-1")


def _none(reports: Reports) -> None:
    shutil.rmtree(reports.folder)


def _all_dirty(reports: Reports) -> None:
    _none(reports)
    reports.add("run-9", [1.0, 1.0], "boot", commit={"dirty": True})


def _unknown(reports: Reports) -> None:
    reports.add("run-9", [1.0, 1.0], "boot", hard={"device": "unknown", "server": "http://server:8000"})


@pytest.mark.parametrize(
    ("spoil", "options", "words"),
    [
        (_too_few, {}, r"2 session\(s\), 3 needed"),
        (
            _none,
            {},
            "no valid session of workload 'anchors' of a clean tree; a session is a folder RUN/perf/session.json",
        ),
        (_all_dirty, {}, "no valid session of workload 'anchors' of a clean tree"),
        (lambda reports: None, {"commit": "feed"}, "of a clean tree of commit feed"),
        (lambda reports: None, {"reason": " "}, "--reason"),
        (_unknown, {}, "a server that does not say what it runs"),
    ],
)
def test_a_baseline_is_not_written_lightly(
    reports: Reports, spoil: Callable[[Reports], None], options: dict[str, str], words: str
) -> None:
    spoil(reports)
    with pytest.raises(BaselineError, match=words):
        reports.write(**options)
    assert not reports.baselines.exists()


def test_a_wider_band_wants_a_word(reports: Reports, tmp_path: Path) -> None:
    narrow = Reports(tmp_path / "narrow")
    for number in range(3):
        narrow.add(f"run-{number}", [100.0, 100.1, 99.9], "boot")
    gathered.write("anchors", narrow.folder, reports.baselines, reason="first")
    with pytest.raises(BaselineError, match="wider band"):
        reports.write()
    reports.write(accept_wider=True)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"session": {}, "workload": "anchors", "valid": true}'])
def test_a_torn_session_file_is_named(reports: Reports, text: str) -> None:
    path = reports.folder / "run-1" / "perf" / history.SESSION_FILE
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"{path}: not a session file"):
        reports.write()


def test_the_command_says_what_it_wrote(reports: Reports, capsys: pytest.CaptureFixture[str]) -> None:
    reports.add("b-dirty", [50.0, 50.0], "boot", commit={"dirty": True})
    arguments = ["baseline", "write", "anchors", "--reason", "why", "--reports-dir", str(reports.folder)]
    with pytest.raises(SystemExit) as end:
        cli.main([*arguments, "--baselines-dir", str(reports.baselines)])
    assert end.value.code == 0
    spoken = " ".join(capsys.readouterr().out.split())
    assert "3 sessions" in spoken
    assert "left out: 1, the tree was dirty" in spoken
    assert "n=50 throughput: 99.99" in spoken
    with pytest.raises(SystemExit) as end:
        cli.main(["baseline", "show", str(reports.baselines)])
    assert "3 sessions of 3 boots" in " ".join(capsys.readouterr().out.split())
