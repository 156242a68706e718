"""Baselines: an edited file is caught, a foreign environment refused, and nothing is written lightly."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashrec_harness import baselines
from flashrec_harness.baselines import Baseline, BaselineError, MeasuredSession
from flashrec_harness.environment import Commit

COMMIT = Commit("c0ffee" * 6, False)
HARD = {"device": "NVIDIA H200", "model": "aa", "cell 0 n": 50, "cell 0 cache": "warm"}


def session(run_id: str, values: list[float], commit: str = COMMIT.sha) -> MeasuredSession:
    samples = {"n=50": {"throughput": values, "p50_ms": [1e3 / v for v in values]}}
    return MeasuredSession(run_id, commit, "boot", samples, {"n=50": {"throughput": [[v, v] for v in values]}})


def baseline(spread: float = 1.0) -> Baseline:
    sessions = [
        session("run-1", [100.0, 100 + spread, 100 - spread]),
        session("run-2", [101.0, 101 + spread, 101 - spread]),
        session("run-3", [99.5, 99.5 + spread, 99.5 - spread]),
    ]
    return Baseline("quick", dict(HARD), {"torch": "2.11"}, {"x": None}, sessions)


def written(path: Path, **changes: object) -> Path:
    baselines.update(path, baseline(), commit=COMMIT, reason="first")
    return path


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = written(tmp_path / "d" / "quick.json")
    loaded = baselines.load(path)
    assert [entry.samples["n=50"]["throughput"] for entry in loaded.sessions] == [
        entry.samples["n=50"]["throughput"] for entry in baseline().sessions
    ]
    assert loaded.history == [{"commit": COMMIT.sha, "reason": "first", "run_id": "run-3"}]
    assert baselines.dump(loaded) == path.read_text()


def test_text_has_sorted_keys_and_one_line_per_process_list(tmp_path: Path) -> None:
    text = written(tmp_path / "quick.json").read_text()
    body = json.loads(text)
    assert list(body) == sorted(body)
    assert '"throughput": [100.0, 101.0, 99.0]' in text
    assert "9.9009900990099" not in text


def test_a_damaged_file_is_no_baseline(tmp_path: Path) -> None:
    whole = json.loads(written(tmp_path / "quick.json").read_text())
    for gone in whole:
        path = tmp_path / "damaged.json"
        path.write_text(json.dumps({key: value for key, value in whole.items() if key != gone}))
        with pytest.raises(BaselineError, match=rf"damaged\.json: not a baseline file \(KeyError: '{gone}'\)"):
            baselines.load(path)
    for damaged in (b"", b"\xff", b"[]", b"{}", json.dumps(whole | {"summary": []}).encode()):
        path.write_bytes(damaged)
        with pytest.raises(BaselineError, match=r"damaged\.json: not a baseline file"):
            baselines.load(path)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"throughput": [100.0, 101.0, 99.0]', '"throughput": [90.0, 91.0, 89.0]', "n=50 throughput says"),
        ('"device": "NVIDIA H200"', '"device": "NVIDIA H100"', "content digest"),
        ('"reason": "first"', '"reason": "better"', "content digest"),
        ('"schema": 1', '"schema": 2', "schema 2"),
        ('"sessions"', '"seasons"', "not a baseline file"),
    ],
)
def test_an_edit_is_caught(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = written(tmp_path / "quick.json")
    edit(path, old, new)
    with pytest.raises(BaselineError, match=message):
        baselines.load(path)


def test_an_edited_centre_is_caught_even_with_a_fresh_digest(tmp_path: Path) -> None:
    path = written(tmp_path / "quick.json")
    body = json.loads(path.read_text())
    body["summary"]["n=50"]["throughput"]["centre"] = 80.0
    body["digest"] = baselines._digest(body)
    path.write_text(json.dumps(body))
    with pytest.raises(BaselineError, match=r"n=50 throughput says .*80\.0"):
        baselines.load(path)


def test_hard_differences_refuse_and_are_named() -> None:
    other = {**HARD, "device": "NVIDIA H100", "cell 0 n": 64, "extra": 1}
    text = baseline().refusal(other)
    assert "device: baseline 'NVIDIA H200', this run 'NVIDIA H100'" in text
    assert "cell 0 n: baseline 50, this run 64" in text
    assert "extra: baseline None, this run 1" in text
    assert "model" not in text
    assert baseline().refusal(HARD) == ""


def test_soft_differences_are_listed() -> None:
    assert baseline().soft_differences({"torch": "2.13", "driver": "x"}) == ["driver", "torch"]


@pytest.mark.parametrize(
    ("commit", "reason", "sessions", "message"),
    [
        (replace(COMMIT, dirty=True), "why", 3, r"\+dirty; commit first"),
        (Commit("", False), "why", 3, "no commit; commit first"),
        (COMMIT, "  ", 3, "--reason"),
        (COMMIT, "why", 2, r"2 session\(s\), 3 needed"),
    ],
)
def test_update_refuses(tmp_path: Path, commit: Commit, reason: str, sessions: int, message: str) -> None:
    fresh = baseline()
    fresh.sessions = fresh.sessions[:sessions]
    with pytest.raises(BaselineError, match=message):
        baselines.update(tmp_path / "quick.json", fresh, commit=commit, reason=reason)
    assert not (tmp_path / "quick.json").exists()


def test_update_refuses_sessions_of_another_commit_or_shape(tmp_path: Path) -> None:
    fresh = baseline()
    fresh.sessions[1] = session("run-2", [1.0, 2.0], commit="beef")
    with pytest.raises(BaselineError, match="other commits: beef"):
        baselines.update(tmp_path / "b.json", fresh, commit=COMMIT, reason="why")
    fresh.sessions[1] = MeasuredSession("run-2", COMMIT.sha, "boot", {"n=8": {"throughput": [1.0]}})
    with pytest.raises(BaselineError, match="different cells"):
        baselines.update(tmp_path / "b.json", fresh, commit=COMMIT, reason="why")


def test_update_refuses_a_wider_band_unless_accepted(tmp_path: Path) -> None:
    path = written(tmp_path / "quick.json")
    before = path.read_text()
    with pytest.raises(BaselineError, match=r"wider band \(.*n=50 throughput: .* --accept-wider"):
        baselines.update(path, baseline(spread=6.0), commit=COMMIT, reason="noisier")
    assert path.read_text() == before
    changes = baselines.update(path, baseline(6.0), commit=COMMIT, reason="noisier", accept_wider=True)
    assert [entry["reason"] for entry in baselines.load(path).history] == ["first", "noisier"]
    assert changes[1].startswith("n=50 throughput: 100.2 -> 100")


@given(st.lists(st.lists(st.floats(1e-3, 1e7), min_size=2, max_size=4), min_size=3, max_size=4))
def test_any_samples_survive_the_fixed_format(values: list[list[float]]) -> None:
    sessions = [session(str(i), v) for i, v in enumerate(values)]
    text = baselines.dump(Baseline("w", HARD, {}, {}, sessions))
    body = json.loads(text)
    again = Baseline("w", HARD, {}, {}, [MeasuredSession(**entry) for entry in body["sessions"]])
    assert baselines.dump(again) == text


def test_path_is_by_device_and_workload() -> None:
    path = baselines.path_for(Path("baselines"), "Intel(R) Xeon(R) @ 2.1GHz", "quick")
    assert path == Path("baselines/intel-r-xeon-r-2-1ghz/quick.json")
