"""Interval arithmetic against brute force; shares, gaps and cadence against numbers worked out by hand."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trace_maker import LAYERS, TraceMaker, write

from flashrec.profiler import ProfileOptions, Profiler, trace_range
from flashrec_harness.outcome import Outcome
from flashrec_harness.tracing import analysis
from flashrec_harness.tracing import intervals as iv
from flashrec_harness.tracing.checks import Expectation, judge_file
from flashrec_harness.tracing.kernels import KernelClass, classify, is_eager_launch, is_stall
from flashrec_harness.tracing.picture import write_picture
from flashrec_harness.tracing.reader import RawTrace, read_trace

WINDOW = (0, 40)
pieces = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=10).map(
    lambda pairs: [(start, start + size) for start, size in pairs]
)


def covered(intervals: list[iv.Interval]) -> set[int]:
    """Unit cells of the window that an interval covers."""
    return {cell for start, end in intervals for cell in range(int(start), int(end)) if cell < WINDOW[1]}


@given(pieces)
def test_union_covers_the_same_cells_without_overlap(intervals: list[iv.Interval]) -> None:
    merged = iv.union(intervals)
    assert covered(merged) == covered(intervals)
    assert iv.length(iv.clip(intervals, WINDOW)) == len(covered(intervals))
    assert all(before[1] < after[0] for before, after in itertools.pairwise(merged))


@given(pieces)
def test_gaps_are_the_complement(intervals: list[iv.Interval]) -> None:
    free = iv.gaps(intervals, WINDOW)
    assert covered(free) == set(range(*WINDOW)) - covered(intervals)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_sm90_qqtst_128x128_128x6_1x2_h_bz_coopA_TNT", KernelClass.FP8_GEMM),
        ("nvjet_sm90_tst_64x64_64x13_4x1_v_bz_TNT", KernelClass.BF16_GEMM),
        ("void cutlass::device_kernel<sm90_fp8_scaled_mm, cutlass::float_e4m3_t>", KernelClass.FP8_GEMM),
        ("cublasLt::splitKreduce_kernel<32, 16, int, float>", KernelClass.OTHER_GEMM),
        ("void flash::prepare_varlen", KernelClass.ATTENTION),
        ("Memcpy DtoH (Device -> Pinned)", KernelClass.COPY),
        ("void at::native::indexSelectSmallIndex", KernelClass.EMBEDDING),
        ("rms_norm_quantize", KernelClass.OTHER),
    ],
)
def test_kernels_are_told_by_their_names(name: str, kind: KernelClass) -> None:
    assert classify(name) is kind


def test_cuda_calls_that_stall_and_launch() -> None:
    assert all(map(is_stall, ("cudaMalloc", "cudaFree", "cudaDeviceSynchronize", "cudaStreamSynchronize")))
    assert not any(map(is_stall, ("cudaMemcpyAsync", "cudaLaunchKernel", "cudaEventRecord", "cudaStreamIsCapturing")))
    assert all(map(is_eager_launch, ("cudaLaunchKernel", "cuLaunchKernelEx", "cudaLaunchKernelExC")))
    assert not is_eager_launch("cudaGraphLaunch")


@pytest.fixture
def made(tmp_path: Path) -> RawTrace:
    return read_trace(write(tmp_path, TraceMaker(waves=3).build()))


def test_waves_run_from_prefill_to_finalize(made: RawTrace) -> None:
    found = analysis.waves(made)
    assert len(found) == 3
    prefills, finals = (analysis.windows(made, name) for name in (analysis.PREFILL, analysis.FINALIZE))
    assert found == [(start, end) for (start, _), (_, end) in zip(prefills, finals, strict=True)]


def test_cadence_is_the_length_of_a_step(made: RawTrace) -> None:
    """A wave's prefill takes four times as long per kernel as each of its two decode steps."""
    step = sum(length for _, length in TraceMaker().step_kernels()) / 1e3
    cadence = analysis.cadence_ms(made, analysis.waves(made))
    assert cadence[1::2] == pytest.approx([step] * 3)
    assert min(cadence[0::2]) >= 4 * step


def test_gemms_are_counted_per_class(made: RawTrace) -> None:
    found = analysis.gemms(made.device)
    forwards = 3 * 3
    assert found.counts == {KernelClass.FP8_GEMM: forwards * 4 * LAYERS, KernelClass.BF16_GEMM: forwards}
    assert found.times_ms[KernelClass.BF16_GEMM] == pytest.approx((3 * 80 + 6 * 20) / 1e3)


def test_the_longest_gap_names_who_holds_it(tmp_path: Path) -> None:
    body = TraceMaker(waves=2).build()
    decode = next(e for e in body["traceEvents"] if e["name"] == "flashrec.decode")
    for event in body["traceEvents"]:
        if event["ts"] > decode["ts"] + decode["dur"] - 5 or (event["cat"], event["name"]) == ("kernel", "late"):
            event["ts"] += 9000
    decode["dur"] += 9000
    frame = decode | {"cat": "python_function", "name": "slow.py(3): think", "ts": decode["ts"] + 100, "dur": 8990}
    body["traceEvents"].append(frame)
    gap = analysis.largest_gaps(read_trace(write(tmp_path, body)), [(decode["ts"], decode["ts"] + decode["dur"])])[0]
    assert gap.length_us > 5000
    assert gap.holder == "flashrec.decode / slow.py(3): think"


def test_a_real_cpu_trace_is_read_and_its_device_checks_are_not_run(tmp_path: Path) -> None:
    profiler = Profiler()
    profiler.start(ProfileOptions(output_dir=tmp_path, profile_prefix="real"))
    for _ in range(3):
        for name in ("flashrec.prefill", "flashrec.decode", "flashrec.finalize"):
            with trace_range(name):
                torch.ones(200, 200) @ torch.ones(200, 200)
    profiler.stop()
    assert profiler.wait(60)
    (path,) = tmp_path.glob("real*.trace.json.gz")
    checks = {check.name: check for check in judge_file(path, Expectation(server=False))}
    assert checks["trace is whole"].outcome is Outcome.PASS
    assert checks["spans"].outcome is Outcome.PASS
    assert checks["waves and gaps"].data["waves"] == 3
    assert 0 < checks["waves and gaps"].data["duty_cycle"] <= 1
    not_run = [check for check in checks.values() if check.outcome is Outcome.NOT_RUN]
    assert len(not_run) == 4
    assert all(check.reason for check in not_run)
    picture = write_picture(path, tmp_path / "p.html").read_text()
    assert "<script" not in picture
    assert "flashrec.prefill" in picture
