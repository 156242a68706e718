"""Verdicts on one trace. Without a GPU in the trace the device assertions are *not run*."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from flashrec_harness.hardware import missing_gpu_reason
from flashrec_harness.outcome import Check, Outcome, Plot, Series
from flashrec_harness.tracing import analysis, share
from flashrec_harness.tracing.integrity import incoherences
from flashrec_harness.tracing.kernels import KernelClass
from flashrec_harness.tracing.reader import RawTrace, TraceError, read_trace

SUITE = "trace"
ENGINE_SPANS = ("flashrec.prefill", "flashrec.decode", "flashrec.finalize")
SERVER_SPANS = ("flashrec.batch.wait", "flashrec.tokenize", "flashrec.respond")
MIN_GRAPHED_SHARE = 0.95
MIN_GPU_BOUND_SHARE = 0.9
EAGER_ALLOWED = re.compile(r"^(Memcpy|Memset)")
"""Kernels that may run eagerly inside decode: the read-back of the results and clearing a counter."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """What the judged engine should show.

    ``fp8_gemms_per_forward`` is layers times fused projections of an FP8 checkpoint, ``None`` for another.
    ``server`` expects the server's spans as well as the engine's. ``search_share`` is what head, expansion and trie
    may take of decode, ``busy`` the least share of the time between the first and the last wave in which the device
    works; by default neither is asked. ``warmup_waves`` are left out.
    """

    server: bool = True
    fp8_gemms_per_forward: int | None = None
    search_share: float | None = None
    busy: float | None = None
    warmup_waves: int = 1


def judge_file(path: Path, expected: Expectation) -> list[Check]:
    """Every check on one trace file; a file that is not whole gives a single *invalid* one."""
    try:
        trace = read_trace(path)
    except TraceError as error:
        reason = str(error)
        return [Check(SUITE, "trace is whole", Outcome.INVALID, "nothing else was judged", reason=reason)]
    broken = incoherences(trace)
    whole = Check(
        SUITE,
        "trace is whole",
        Outcome.INVALID if broken else Outcome.PASS,
        f"{path.name}: one gzip stream with its end marker; {len(trace.spans)} spans, "
        f"{len(trace.cpu_ops)} operators, {len(trace.device)} device events over "
        f"{(trace.window_us[1] - trace.window_us[0]) / 1e3:.0f} ms",
        reason="; ".join(broken),
        data={"file": path.name, "devices": trace.device_names},
    )
    if broken:
        return [whole]
    return [whole, _spans(trace, expected), _waves(trace), *_device_checks(trace, expected)]


def _spans(trace: RawTrace, expected: Expectation) -> Check:
    rows = analysis.span_table(trace)
    counts = {row.name: row.count for row in rows}
    wanted = ENGINE_SPANS + (SERVER_SPANS if expected.server else ())
    missing = [name for name in wanted if name not in counts]
    uneven = counts.get(analysis.PREFILL, 0) != counts.get(analysis.FINALIZE, 0)
    reason = ""
    if missing:
        reason = f"no span {', '.join(missing)}"
    elif uneven:
        reason = (
            f"{counts[analysis.PREFILL]} prefill spans but {counts[analysis.FINALIZE]} finalize spans: "
            "every wave has one of each"
        )
    return Check(
        SUITE,
        "spans",
        Outcome.FAIL if reason else Outcome.PASS,
        f"{len(wanted)} expected span names, {sum(counts.values())} spans of {len(counts)} names found",
        reason=reason,
        rows=[{key: _rounded(value) for key, value in asdict(row).items()} for row in rows],
    )


def _rounded(value: object) -> object:
    return round(value, 3) if isinstance(value, float) else value


def _waves(trace: RawTrace) -> Check:
    found = analysis.waves(trace)
    if not found:
        return Check(
            SUITE,
            "waves and gaps",
            Outcome.FAIL,
            "nothing to decompose",
            reason="no wave: no prefill span that a decode follows",
        )
    duty = analysis.duty_cycle(trace, found)
    gaps = analysis.largest_gaps(trace, found)
    lengths = [(end - start) / 1e3 for start, end in found]
    worker = "device" if trace.has_device else "engine thread's operators"
    idle = (1 - duty) * 100
    return Check(
        SUITE,
        "waves and gaps",
        Outcome.PASS,
        f"{len(found)} waves, median {statistics.median(lengths):.1f} ms under the profiler; {worker} busy "
        f"{duty:.0%} of it, {idle:.0f} % gaps"
        + (f", the longest {gaps[0].length_us:.0f} us in {gaps[0].holder}" if gaps else ""),
        data={"duty_cycle": duty, "waves": len(found)},
        rows=[{"gap us": round(gap.length_us, 1), "held by": gap.holder} for gap in gaps],
        plots=[
            Plot(
                "length of each wave (under the profiler)",
                "wave",
                "ms",
                [Series("waves", list(range(len(lengths))), lengths, style="line")],
            )
        ],
    )


_DeviceCheck = Callable[[RawTrace, Expectation], Check]


def _device_checks(trace: RawTrace, expected: Expectation) -> list[Check]:
    checks: list[tuple[str, _DeviceCheck]] = [
        ("decode by graph replay", _graph_replay),
        ("forward is GPU-bound", _gpu_bound),
        ("no stalls in steady state", _no_stalls),
        ("FP8 GEMMs are FP8", _fp8),
        *([(share.NAME, _search_share)] if expected.search_share is not None else []),
        *([("device is busy", _busy)] if expected.busy is not None else []),
    ]
    if trace.has_device:
        return [judge(trace, expected) for _, judge in checks]
    return [
        Check(SUITE, name, Outcome.NOT_RUN, "the trace has no device events", reason=missing_gpu_reason())
        for name, _ in checks
    ]


def _search_share(trace: RawTrace, expected: Expectation) -> Check:
    assert expected.search_share is not None
    return share.judge_share(trace, expected.search_share, warmup_waves=expected.warmup_waves)


def _busy(trace: RawTrace, expected: Expectation) -> Check:
    """Over the whole of a load, what lies between its waves included."""
    name, wanted = "device is busy", expected.busy
    assert wanted is not None
    found = analysis.waves(trace)[expected.warmup_waves :]
    if not found:
        return Check(SUITE, name, Outcome.INVALID, "nothing to judge", reason="no wave after those of the warm-up")
    start, end = found[0][0], found[-1][1]
    share_busy = analysis.duty_cycle(trace, [(start, end)])
    gaps = analysis.largest_gaps(trace, [(start, end)])
    longest = f"; longest gap {gaps[0].length_us:.0f} us in {gaps[0].holder}" if gaps else ""
    return Check(
        SUITE,
        name,
        Outcome.PASS if share_busy >= wanted else Outcome.FAIL,
        f"device busy {share_busy:.1%} of {(end - start) / 1e3:.0f} ms, {len(found)} waves with what lies between them "
        f"(at least {wanted:.0%}){longest}",
        reason="" if share_busy >= wanted else f"the device rests {1 - share_busy:.1%} of the time",
        data={"busy": share_busy},
        rows=[{"gap us": round(gap.length_us, 1), "held by": gap.holder} for gap in gaps],
    )


def _graph_replay(trace: RawTrace, expected: Expectation) -> Check:
    decode = analysis.windows(trace, analysis.DECODE, drop_first=expected.warmup_waves)
    found = analysis.launches(trace, decode, EAGER_ALLOWED)
    reason = ""
    if found.graph_launches < len(decode):
        reason = f"{found.graph_launches} graph launches in {len(decode)} decode spans: decode runs eagerly"
    elif found.eager_launches:
        name, times = next(iter(found.eager_launches.items()))
        reason = f"{sum(found.eager_launches.values())} eager kernels in decode, most often {name[:60]} ({times}x)"
    elif found.graphed_share < MIN_GRAPHED_SHARE:
        reason = f"only {found.graphed_share:.1%} of decode's kernel time is from graphs"
    return Check(
        SUITE,
        "decode by graph replay",
        Outcome.FAIL if reason else Outcome.PASS,
        f"{found.graph_launches} graph launches in {len(decode)} decode spans; {found.graphed_share:.1%} of "
        f"kernel time from graphs (at least {MIN_GRAPHED_SHARE:.0%}), {sum(found.eager_launches.values())} "
        "eager kernels outside the allowlist",
        reason=reason,
        rows=[{"eager kernel": name, "launches": times} for name, times in found.eager_launches.items()][:20],
        data={"graphed_share": found.graphed_share},
    )


def _gpu_bound(trace: RawTrace, expected: Expectation) -> Check:
    steps = [
        window
        for name in (analysis.PREFILL, analysis.DECODE)
        for window in analysis.windows(trace, name, drop_first=expected.warmup_waves)
    ]
    ahead = analysis.gpu_bound_share(trace, steps)
    duty = analysis.duty_cycle(trace, analysis.waves(trace)[expected.warmup_waves :])
    cadence = analysis.cadence_ms(trace, analysis.waves(trace))
    steps_text = f"; step cadence {statistics.median(cadence):.2f} ms (median)" if cadence else ""
    bound = ahead >= MIN_GPU_BOUND_SHARE
    return Check(
        SUITE,
        "forward is GPU-bound",
        Outcome.PASS if bound else Outcome.FAIL,
        f"the host launches ahead of the device in {ahead:.0%} of {len(steps)} steps (at least "
        f"{MIN_GPU_BOUND_SHARE:.0%}); device busy {duty:.0%} of the waves{steps_text}",
        reason="" if bound else f"in {1 - ahead:.0%} of steps the device waits for the host to launch",
        data={"gpu_bound_share": ahead, "duty_cycle": duty},
    )


def _no_stalls(trace: RawTrace, expected: Expectation) -> Check:
    steady = [
        window
        for name in (analysis.PREFILL, analysis.DECODE)
        for window in analysis.windows(trace, name, drop_first=expected.warmup_waves)
    ]
    found = analysis.stalls(trace, steady)
    total = sum(found.values())
    return Check(
        SUITE,
        "no stalls in steady state",
        Outcome.FAIL if found else Outcome.PASS,
        f"{len(steady)} prefill and decode spans: {total} calls that allocate, free or wait (the read-back "
        "belongs to finalize)",
        reason=f"{next(iter(found))} {next(iter(found.values()))}x" if found else "",
        rows=[{"call": name, "times": times} for name, times in found.items()],
    )


def _fp8(trace: RawTrace, expected: Expectation) -> Check:
    name = "FP8 GEMMs are FP8"
    if expected.fp8_gemms_per_forward is None:
        reason = "the checkpoint is not quantised to FP8"
        return Check(SUITE, name, Outcome.NOT_RUN, "nothing to find", reason=reason)
    found = analysis.gemms(trace.device)
    fp8, bf16 = (found.counts.get(kind, 0) for kind in (KernelClass.FP8_GEMM, KernelClass.BF16_GEMM))
    whole, rest = divmod(fp8, expected.fp8_gemms_per_forward)
    # The head stays bf16 (SPEC M5): one product per forward pass, and nothing else.
    reason = ""
    if fp8 == 0:
        reason = "no FP8 GEMM ran"
    elif rest:
        reason = f"{fp8} FP8 GEMMs are not a multiple of {expected.fp8_gemms_per_forward} per forward pass"
    elif bf16 > whole:
        reason = f"{bf16} bf16 GEMMs in {whole} forward passes: only the head may be bf16"
    return Check(
        SUITE,
        name,
        Outcome.FAIL if reason else Outcome.PASS,
        f"{fp8} FP8 GEMMs = {whole} forward passes x {expected.fp8_gemms_per_forward}; {bf16} bf16 (head)",
        reason=reason,
        rows=[{"bf16 kernel": kernel, "times": times} for kernel, times in found.bf16_names.items()][:20],
    )
