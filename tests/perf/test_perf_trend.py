"""Trends: change points found where they were planted and nowhere else, over reports and a baseline's git history."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrec_harness import baselines, cli
from flashrec_harness.baselines import Baseline, MeasuredSession
from flashrec_harness.environment import Commit
from flashrec_harness.perf import changepoints, history

HARD = {"device": "NVIDIA H200", "cell 0 n": 10}


def series(levels: list[float], each: int, *, noise: float, seed: int) -> list[float]:
    rng = np.random.default_rng(seed)
    return [level * math.exp(rng.normal(0, noise)) for level in levels for _ in range(each)]


def test_a_flat_series_has_change_points_in_at_most_one_percent() -> None:
    found = [bool(changepoints.find(series([100], 20, noise=0.01, seed=seed))) for seed in range(300)]
    assert sum(found) <= 6  # 3 expected; 7 and more have a chance below 4 %


def test_planted_changes_are_found_where_they_are() -> None:
    hits = 0
    for seed in range(40):
        points = changepoints.find(series([100, 95, 105], 10, noise=0.01, seed=seed))
        hits += [point.index for point in points] == [10, 20]
        assert all(abs(point.change) > 0.02 for point in points)
    assert hits >= 32


def test_a_change_below_the_floor_is_none_and_few_figures_have_none() -> None:
    assert changepoints.find([100.0] * 15 + [100.5] * 15) == []
    assert changepoints.find([100.0, 100, 100, 50, 50, 50, 50]) == []
    (point,) = changepoints.find([100.0, 100.1] * 6 + [90.0, 90.1] * 6)
    assert (point.index, round(point.change, 3)) == (12, round(math.log(90.05 / 100.05), 3))


@given(st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=24))
def test_levels_are_the_geometric_means_between_change_points(values: list[float]) -> None:
    points = changepoints.find(values)
    line = changepoints.levels(values, points)
    assert len(line) == len(values)
    starts = [0, *(point.index for point in points)]
    for start, stop in zip(starts, [*starts[1:], len(values)], strict=True):
        expected = math.exp(sum(math.log(v) for v in values[start:stop]) / (stop - start))
        assert line[start:stop] == pytest.approx([expected] * (stop - start))


def store(reports: Path, number: int, throughput: float, *, valid: bool = True, n: int = 10) -> None:
    folder = reports / f"202611{number:02d}-120000-c{number:07d}" / "perf"
    folder.mkdir(parents=True)
    samples = {"n=10": {"throughput": [throughput, throughput], "p50_ms": [1.0, 1.0], "p99_ms": [2.0, 2.0]}}
    session = {"run_id": folder.parent.name, "commit": f"c{number:07d}", "boot_id": "b", "samples": samples}
    body = {"workload": "quick", "environment": {"hard": HARD | {"cell 0 n": n}}, "session": session, "valid": valid}
    (folder / "session.json").write_text(json.dumps(body))


def test_the_command_names_the_commit_that_changed_the_level(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(1, 13):
        store(tmp_path, number, (100 if number < 8 else 93) + number % 3 * 0.2)
    store(tmp_path, 20, 1.0, valid=False)
    store(tmp_path, 0, 500.0, n=64)
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["trend", "quick", "--reports-dir", str(tmp_path), "--baselines-dir", str(tmp_path / "none")])
    assert exit_info.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "12 sessions on NVIDIA H200" in said
    assert "1 sessions of another device" in said
    assert "c0000008" in said
    assert "worse" in said
    page = (tmp_path / "trend-quick.html").read_text()
    assert page.count("<svg") == 3
    assert "polyline" in page


def test_a_workload_without_sessions_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["trend", "quick", "--reports-dir", str(tmp_path), "--baselines-dir", str(tmp_path)])
    assert exit_info.value.code == 2
    assert "no stored session of workload 'quick'" in capsys.readouterr().err


def test_a_baselines_git_history_is_read(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init", "-q")
    path = baselines.path_for(tmp_path / "baselines", "NVIDIA H200", "quick")
    for version in range(2):
        sha = f"{version}" * 40
        sessions = [
            MeasuredSession(f"run-{version}{number}", sha, "b", {"n=10": {"throughput": [100.0 + version, 101.0]}})
            for number in range(3)
        ]
        fresh = Baseline("quick", dict(HARD), {}, {}, sessions)
        baselines.update(path, fresh, commit=Commit(sha, False), reason="why", accept_wider=True)
        git("add", "--all")
        git("commit", "-q", "-m", str(version))
    found = history.sessions_of("quick", tmp_path / "reports", tmp_path / "baselines")
    assert [past.run_id for past in found] == ["run-00", "run-01", "run-02", "run-10", "run-11", "run-12"]
    assert found[0].value("n=10", "throughput") == pytest.approx(math.sqrt(100 * 101))
    (trend,) = history.trends(found, ["throughput"])
    assert "change points are looked for in 8" in history.describe(trend)
