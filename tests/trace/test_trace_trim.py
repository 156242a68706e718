"""A trimmed trace is small and whole, and its verdicts are those of the trace it was cut from."""

from __future__ import annotations

from pathlib import Path

import pytest
from trace_maker import LAYERS, TraceMaker, write
from typer.testing import CliRunner

from flashrec.errors import ConfigError
from flashrec_harness.cli import app
from flashrec_harness.outcome import Outcome
from flashrec_harness.tracing import trim as trimming
from flashrec_harness.tracing.checks import Expectation, judge_file
from flashrec_harness.tracing.reader import read_trace

FP8 = Expectation(fp8_gemms_per_forward=4 * LAYERS, server=False)


def outcomes(path: Path) -> dict[str, Outcome]:
    return {check.name: check.outcome for check in judge_file(path, FP8)}


@pytest.mark.parametrize("fault", [{}, {"eager": True}, {"bf16": True}, {"sync": True}, {"nodeless": True}])
def test_a_trimmed_trace_gets_the_same_verdicts(tmp_path: Path, fault: dict[str, bool]) -> None:
    source = write(tmp_path, TraceMaker(waves=6, **fault).build())
    target = trimming.trim(source, tmp_path / "small.json.gz", 2)
    assert outcomes(target) == outcomes(source)
    kept, whole = read_trace(target), read_trace(source)
    assert sum(span["name"] == "flashrec.prefill" for span in kept.spans) == 2
    assert len(kept.device) == len(whole.device) // 3
    assert kept.device_names == ["NVIDIA H200"]


def test_waves_in_a_pipeline_are_cut_whole(tmp_path: Path) -> None:
    """Each wave is launched before the last is finished, as the scheduler does on a GPU."""
    source = write(tmp_path, TraceMaker(waves=6, pipelined=True).build())
    target = trimming.trim(source, tmp_path / "small.json.gz", 2)
    assert outcomes(target) == outcomes(source)
    assert set(outcomes(target).values()) == {Outcome.PASS}
    names = [span["name"] for span in read_trace(target).spans if span["name"] != "flashrec.batch.wait"]
    assert [name.removeprefix("flashrec.") for name in names] == [*["prefill", "decode"] * 2, "finalize", "finalize"]


def test_what_cannot_be_trimmed_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path, TraceMaker(waves=3).build())
    with pytest.raises(ConfigError, match="3 whole waves, 4 needed to keep 3 after 1"):
        trimming.trim(source, tmp_path / "small.json.gz", 3)
    monkeypatch.setattr(trimming, "MAX_BYTES", 300)
    with pytest.raises(ConfigError, match=r"bytes, 300 are allowed; keep fewer than 2 waves"):
        trimming.trim(source, tmp_path / "small.json.gz", 2)
    assert not (tmp_path / "small.json.gz").exists()
    source.write_bytes(source.read_bytes()[:-9])
    with pytest.raises(ConfigError, match="cut short"):
        trimming.trim(source, tmp_path / "small.json.gz", 1)


def test_the_command_trims_and_shows_what_is_left(tmp_path: Path) -> None:
    source, small = write(tmp_path, TraceMaker(waves=6).build()), tmp_path / "small.json.gz"
    call = ["trace", str(source), "--trim", str(small), "--waves", "3", "--fp8-gemms", str(4 * LAYERS)]
    done = CliRunner().invoke(app, call)
    assert done.exit_code == 0, done.output
    assert "Spans, as they nest" in done.output
    assert small.stat().st_size < source.stat().st_size
    assert (tmp_path / "small.html").is_file()


@pytest.mark.parametrize(("lost", "outcome"), [(False, Outcome.PASS), (True, Outcome.INVALID)])
def test_a_lost_kernel_shows_without_node_ids_too(tmp_path: Path, lost: bool, outcome: Outcome) -> None:
    path = write(tmp_path, TraceMaker(waves=5, nodeless=True, lost=lost).build())
    check = judge_file(path, FP8)[0]
    assert check.outcome is outcome
    if lost:
        assert "a replay of the graph that opens with embedding_kernel has 29 of its 30 kernels" in check.reason


def test_two_programs_that_open_alike_are_no_loss(tmp_path: Path) -> None:
    """Two of six replays run one kernel more: another program, not a loss in the four."""
    body = TraceMaker(waves=6, nodeless=True).build()
    launches = [event for event in body["traceEvents"] if event["name"] == "cudaGraphLaunch"][:2]
    ids = {event["args"]["correlation"] for event in launches}
    for number in ids:
        last = [event for event in body["traceEvents"] if event.get("args", {}).get("correlation") == number][-1]
        body["traceEvents"].insert(0, last | {"name": "filter_kernel", "ts": last["ts"] + 0.5})
    assert judge_file(write(tmp_path, body), FP8)[0].outcome is Outcome.PASS


def test_two_programs_in_equal_use_are_no_loss(tmp_path: Path) -> None:
    """Four of seven replays run one kernel more, in other grids: the programs of two row buckets (an H200's trace)."""
    body = TraceMaker(waves=7, nodeless=True).build()
    launches = [event for event in body["traceEvents"] if event["name"] == "cudaGraphLaunch"][:4]
    for number in {event["args"]["correlation"] for event in launches}:
        mine = [event for event in body["traceEvents"] if event.get("args", {}).get("correlation") == number]
        kernels = [event for event in mine if event.get("cat") == "kernel"]
        for kernel in kernels[5:9]:
            kernel["args"]["grid"] = [997, 1, 1]
        body["traceEvents"].insert(0, kernels[-1] | {"name": "merge_kernel", "ts": kernels[-1]["ts"] + 0.5})
    assert judge_file(write(tmp_path, body), FP8)[0].outcome is Outcome.PASS
