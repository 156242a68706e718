"""Real traces of an H200, cut to a few waves: each gets the verdict that its name says.

They are made with ``flashrec-harness trace FILE --trim tests/trace/data/NAME --waves N`` from what ``/stop_profile``
wrote under the fault that the name stands for (``--plant eager-decode``, ``bf16-under-fp8``, ``sync-in-decode``).
"""

from __future__ import annotations

import gzip
import io
from dataclasses import dataclass
from pathlib import Path

import orjson
import pytest
from rich.console import Console

from flashrec_harness.outcome import Check, Outcome
from flashrec_harness.tracing.checks import Expectation, judge_file
from flashrec_harness.tracing.picture import show_file
from flashrec_harness.tracing.trim import MAX_BYTES

DATA = Path(__file__).parent / "data"
FP8_GEMMS = 28 * 4
"""Products of a forward pass: 28 layers (Qwen3-1.7B's shape) of four projections."""

LAYER_KERNELS = (
    "gemm_e4m3", "qqtst", "_rms_norm", "_quant", "_silu_mul", "_qk_norm_rope_store", "context_kernel", "merge_kernel",
)  # fmt: skip

GRAPH, BOUND, STALLS, FP8 = (
    "decode by graph replay",
    "forward is GPU-bound",
    "no stalls in steady state",
    "FP8 GEMMs are FP8",
)


@dataclass(frozen=True)
class Expected:
    """The check that must be red, with words of its reason; and those that must pass beside it."""

    red: str
    reason: str
    green: tuple[str, ...]


TRACES = {
    "h200-graph.json.gz": Expected("", "", (GRAPH, BOUND, STALLS, FP8)),
    "h200-eager.json.gz": Expected(GRAPH, "decode runs eagerly", (STALLS, FP8)),
    "h200-bf16.json.gz": Expected(FP8, "no FP8 GEMM ran", (GRAPH, STALLS)),
    "h200-sync.json.gz": Expected(STALLS, "Synchronize", (GRAPH, FP8)),
}


@pytest.fixture(params=list(TRACES))
def name(request: pytest.FixtureRequest) -> str:
    if not (DATA / request.param).is_file():
        pytest.skip(f"tests/trace/data/{request.param} has not been recorded yet")
    return str(request.param)


def judged(path: Path) -> dict[str, Check]:
    return {check.name: check for check in judge_file(path, Expectation(server=False, fp8_gemms_per_forward=FP8_GEMMS))}


def test_the_verdict_is_what_the_name_says(name: str) -> None:
    expected, checks = TRACES[name], judged(DATA / name)
    for passing in ("trace is whole", "spans", "waves and gaps", *expected.green):
        assert checks[passing].outcome is Outcome.PASS, f"{passing}: {checks[passing].reason}"
    if expected.red:
        assert checks[expected.red].outcome is Outcome.FAIL
        assert expected.reason in checks[expected.red].reason


def test_it_is_of_an_h200_and_small(name: str) -> None:
    assert (DATA / name).stat().st_size <= MAX_BYTES
    assert "H200" in judged(DATA / name)["trace is whole"].data["devices"][0]


def test_the_search_s_share_of_decode_is_measured_and_bounded() -> None:
    """Against a sum made here, kernel by kernel, and a bound just above and just below it."""
    path = DATA / "h200-sync.json.gz"  # its waves do not overlap
    body = orjson.loads(gzip.decompress(path.read_bytes()))
    spans = sorted(
        (event["ts"], event["ts"] + event["dur"]) for event in body["traceEvents"] if event["name"] == "flashrec.decode"
    )
    replays = {
        event["args"]["correlation"]
        for event in body["traceEvents"]
        if event["name"] == "cudaGraphLaunch" and any(start <= event["ts"] <= end for start, end in spans[1:])
    }
    kernels = [event for event in body["traceEvents"] if event.get("args", {}).get("correlation") in replays]
    kernels = sorted((k for k in kernels if k["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")), key=lambda k: k["ts"])
    search = total = end = 0.0
    for kernel in kernels:
        own = max(0.0, kernel["ts"] + kernel["dur"] - max(kernel["ts"], end))
        end = max(end, kernel["ts"] + kernel["dur"])
        layer = any(part in kernel["name"] for part in LAYER_KERNELS) or kernel["cat"] == "gpu_memset"
        total, search = total + own, search + (0.0 if layer else own)
    assert len(replays) >= 2
    share = search / total
    assert 0.01 < share < 0.2

    def verdict(most: float) -> Check:
        checks = judge_file(path, Expectation(server=False, fp8_gemms_per_forward=FP8_GEMMS, search_share=most))
        (check,) = (check for check in checks if check.name == "head, expansion and trie within their share")
        return check

    assert verdict(share + 1e-6).outcome is Outcome.PASS
    assert verdict(share - 1e-6).outcome is Outcome.FAIL
    assert verdict(1.0).data["share"] == pytest.approx(share)


@pytest.mark.parametrize("damage", ["truncated", "doubled"])
def test_a_damaged_copy_is_invalid(name: str, damage: str, tmp_path: Path) -> None:
    whole = (DATA / name).read_bytes()
    path = tmp_path / name
    path.write_bytes(whole[: len(whole) // 2] if damage == "truncated" else whole + whole)
    (check,) = judged(path).values()
    assert check.outcome is Outcome.INVALID


def test_it_is_shown(name: str, tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=160)
    expected = Expectation(server=False, fp8_gemms_per_forward=FP8_GEMMS)
    code = show_file(DATA / name, tmp_path / "trace.html", console, expected)
    assert code == (1 if TRACES[name].red else 0)
    assert "GPU stream" in (tmp_path / "trace.html").read_text(encoding="utf-8")


def test_every_file_of_the_folder_has_a_verdict() -> None:
    assert {path.name for path in DATA.glob("*.gz")} <= set(TRACES)
