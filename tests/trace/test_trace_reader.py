"""Whole files are read; cut, doubled and foreign ones are refused with what is wrong."""

from __future__ import annotations

import gzip
import json
import threading
import time
from pathlib import Path

import pytest
from trace_maker import TraceMaker, write

from flashrec_harness.outcome import Outcome
from flashrec_harness.tracing.checks import Expectation, judge_file
from flashrec_harness.tracing.reader import TraceError, read_trace, wait_until_complete


def test_lanes_are_sorted_into_their_kinds(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, TraceMaker(waves=2).build()))
    assert len(trace.spans) == 2 * 4 + 2
    assert {event["cat"] for event in trace.device} == {"kernel"}
    assert {event["cat"] for event in trace.runtime} == {"cuda_runtime"}
    assert trace.device_names == ["NVIDIA H200"]
    assert trace.has_device
    assert [e["ts"] for e in trace.device] == sorted(e["ts"] for e in trace.device)


def test_plain_json_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(TraceMaker(waves=1).build()))
    assert read_trace(path).spans


def damaged(kind: str, good: bytes) -> bytes:
    body = json.loads(gzip.decompress(good))
    events = body["traceEvents"]
    if kind == "truncated":
        return good[: len(good) * 2 // 3]
    if kind == "doubled":
        return good + good
    if kind == "trailing bytes":
        return good + b"junk"
    if kind == "no end marker":
        body["traceEvents"] = events[:-1]
    elif kind == "two profiles":
        body["traceEvents"] = events + events
    elif kind == "no events":
        body["traceEvents"] = events[-1:]
    elif kind == "not a trace":
        body = {"events": []}
    elif kind == "not json":
        return gzip.compress(b"{oops")
    return gzip.compress(json.dumps(body).encode())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("truncated", "cut short"),
        ("doubled", "bytes follow the gzip stream"),
        ("trailing bytes", "4 bytes follow"),
        ("no end marker", "0 end markers"),
        ("two profiles", "2 end markers"),
        ("no events", "recorded nothing"),
        ("not a trace", "no traceEvents"),
        ("not json", "not JSON"),
    ],
)
def test_a_damaged_file_makes_everything_invalid(tmp_path: Path, kind: str, message: str) -> None:
    path = write(tmp_path, TraceMaker().build())
    path.write_bytes(damaged(kind, path.read_bytes()))
    with pytest.raises(TraceError, match=message):
        read_trace(path)
    (check,) = judge_file(path, Expectation())
    assert check.outcome is Outcome.INVALID
    assert message in check.reason


def test_waiting_ends_when_a_slow_writer_has_finished(tmp_path: Path) -> None:
    good = write(tmp_path, TraceMaker().build(), "good.gz").read_bytes()
    path = tmp_path / "slow.gz"

    def writer() -> None:
        with path.open("wb") as out:
            for start in range(0, len(good), len(good) // 4 + 1):
                out.write(good[start : start + len(good) // 4 + 1])
                out.flush()
                time.sleep(0.05)

    thread = threading.Thread(target=writer)
    thread.start()
    wait_until_complete(path, timeout_s=10, poll_s=0.02)
    assert path.read_bytes() == good
    thread.join()


def test_waiting_gives_up_and_says_why(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="does not exist"):
        wait_until_complete(tmp_path / "never.gz", timeout_s=0.05, poll_s=0.01)
    path = write(tmp_path, TraceMaker().build())
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(TraceError, match="cut short"):
        wait_until_complete(path, timeout_s=0.2, poll_s=0.01)
