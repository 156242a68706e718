"""The device assertions: a good trace passes, and each planted fault is caught by the check that should."""

from __future__ import annotations

from pathlib import Path

import pytest
from trace_maker import BF16_KERNEL, LAYERS, TraceMaker, write

from flashrec_harness.outcome import Check, Outcome
from flashrec_harness.tracing.checks import Expectation, judge_file

FP8 = Expectation(fp8_gemms_per_forward=4 * LAYERS)
DEVICE_CHECKS = {
    "decode by graph replay",
    "forward is GPU-bound",
    "no stalls in steady state",
    "FP8 GEMMs are FP8",
}


def judged(tmp_path: Path, maker: TraceMaker, expected: Expectation = FP8) -> dict[str, Check]:
    return {check.name: check for check in judge_file(write(tmp_path, maker.build()), expected)}


def test_a_good_trace_passes_everything(tmp_path: Path) -> None:
    checks = judged(tmp_path, TraceMaker())
    assert {check.name: check.outcome for check in checks.values()} == dict.fromkeys(checks, Outcome.PASS)
    assert checks.keys() > DEVICE_CHECKS
    assert checks["decode by graph replay"].data["graphed_share"] == 1.0
    assert "15 forward passes x 8; 15 bf16" in checks["FP8 GEMMs are FP8"].summary


@pytest.mark.parametrize(
    ("fault", "caught_by", "message"),
    [
        ({"eager": True}, "decode by graph replay", "0 graph launches in 4 decode spans"),
        ({"bf16": True}, "FP8 GEMMs are FP8", "no FP8 GEMM ran"),
        ({"sync": True}, "no stalls in steady state", "cudaStreamSynchronize 4x"),
        ({"launch_bound": True}, "forward is GPU-bound", "the device waits"),
    ],
)
def test_each_fault_is_caught_by_its_check_alone(
    tmp_path: Path, fault: dict[str, bool], caught_by: str, message: str
) -> None:
    checks = judged(tmp_path, TraceMaker(**fault))  # type: ignore[arg-type]
    red = {name for name, check in checks.items() if check.outcome is not Outcome.PASS}
    assert red == {caught_by}
    assert checks[caught_by].outcome is Outcome.FAIL
    assert message in checks[caught_by].reason


def test_a_stray_bf16_gemm_is_counted(tmp_path: Path) -> None:
    body = TraceMaker().build()
    kernel = next(event for event in body["traceEvents"] if event["name"] == BF16_KERNEL)
    body["traceEvents"].insert(0, kernel | {"ts": kernel["ts"] + 1})
    checks = {check.name: check for check in judge_file(write(tmp_path, body), FP8)}
    assert "16 bf16 GEMMs in 15 forward passes" in checks["FP8 GEMMs are FP8"].reason


@pytest.mark.parametrize(
    ("fault", "message"),
    [({"lost": True}, "kernels: events were lost"), ({"early": True}, "start before their launch")],
)
def test_an_incoherent_trace_is_invalid(tmp_path: Path, fault: dict[str, bool], message: str) -> None:
    checks = judged(tmp_path, TraceMaker(**fault))  # type: ignore[arg-type]
    assert list(checks) == ["trace is whole"]
    assert checks["trace is whole"].outcome is Outcome.INVALID
    assert message in checks["trace is whole"].reason


def test_without_an_fp8_checkpoint_that_check_is_not_run(tmp_path: Path) -> None:
    check = judged(tmp_path, TraceMaker(), Expectation())["FP8 GEMMs are FP8"]
    assert (check.outcome, check.reason) == (Outcome.NOT_RUN, "the checkpoint is not quantised to FP8")


def test_missing_spans_fail(tmp_path: Path) -> None:
    body = TraceMaker().build()
    body["traceEvents"] = [event for event in body["traceEvents"] if event["name"] != "flashrec.tokenize"]
    checks = {check.name: check for check in judge_file(write(tmp_path, body), FP8)}
    assert checks["spans"].outcome is Outcome.FAIL
    assert checks["spans"].reason == "no span flashrec.tokenize"
    alone = Expectation(server=False, fp8_gemms_per_forward=8)
    assert {check.name: check for check in judge_file(write(tmp_path, body), alone)}["spans"].outcome is Outcome.PASS


def test_a_wave_without_its_finalize_fails(tmp_path: Path) -> None:
    body = TraceMaker().build()
    events = body["traceEvents"]
    events.remove(next(event for event in events if event["name"] == "flashrec.finalize"))
    checks = {check.name: check for check in judge_file(write(tmp_path, body), FP8)}
    assert "5 prefill spans but 4 finalize spans" in checks["spans"].reason


@pytest.mark.parametrize(("wanted", "outcome"), [(-0.001, Outcome.PASS), (0.001, Outcome.FAIL)])
def test_how_busy_the_device_is_counts_what_lies_between_waves(tmp_path: Path, wanted: float, outcome: Outcome) -> None:
    """By hand: the kernels' time from the second prefill to the last finalize, which never overlap here, over it."""
    body = TraceMaker().build()
    spans = [event for event in body["traceEvents"] if event.get("cat") == "user_annotation"]
    start = sorted(event["ts"] for event in spans if event["name"] == "flashrec.prefill")[1]
    end = max(
        event["ts"] + event["dur"] for event in spans if event["name"] in ("flashrec.decode", "flashrec.finalize")
    )
    worked = sum(
        max(0.0, min(end, event["ts"] + event["dur"]) - max(start, event["ts"]))
        for event in body["traceEvents"]
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    )
    busy = worked / (end - start)
    assert 0.3 < busy < 1
    check = judged(tmp_path, TraceMaker(), Expectation(busy=busy + wanted))["device is busy"]
    assert check.outcome is outcome
    assert check.data["busy"] == pytest.approx(busy)
    assert check.rows
    assert "device is busy" not in judged(tmp_path, TraceMaker(), Expectation())
