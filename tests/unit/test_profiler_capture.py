"""The profiler's capture window, files and spans, without a model."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from flashrec.errors import RequestError
from flashrec.profiler import ProfileOptions, Profiler, ProfilerStateError, trace_range


def wave(profiler: Profiler, decode_steps: int) -> None:
    """What the runtime does around one wave."""
    profiler.on_forward("prefill")
    with trace_range("flashrec.prefill"):
        torch.ones(4) + 1
    for _ in range(decode_steps):
        profiler.on_forward("decode")
        with trace_range("flashrec.decode"):
            torch.ones(4) + 1
    profiler.on_wave_end()


def spans(path: Path) -> Counter[str]:
    trace: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return Counter(event["name"] for event in trace["traceEvents"] if event.get("name", "").startswith("flashrec."))


def options(directory: Path, **changes: Any) -> ProfileOptions:
    return ProfileOptions(output_dir=directory, with_stack=False, record_shapes=False, **changes)


def finish(profiler: Profiler) -> list[Path]:
    assert profiler.wait(60)
    assert profiler.state == "idle"
    status = profiler.status()
    assert status["error"] is None
    files = status["files"]
    assert isinstance(files, list)
    return [Path(name) for name in files]


def test_num_steps_counts_the_prefill_and_ends_with_the_wave(tmp_path: Path) -> None:
    profiler = Profiler()
    profiler.start(options(tmp_path, num_steps=4, profile_prefix="run"))
    wave(profiler, 2)  # 3 passes: below 4, so the second wave is recorded to its end
    assert profiler.state == "recording"
    wave(profiler, 2)
    wave(profiler, 2)
    (path,) = finish(profiler)
    assert path == tmp_path / "run-TP-0.trace.json.gz"
    assert spans(path) == {"flashrec.prefill": 2, "flashrec.decode": 4}
    assert profiler.forward_passes == 9
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [path.name]


def test_start_step_waits_for_that_forward_pass(tmp_path: Path) -> None:
    profiler = Profiler()
    wave(profiler, 2)
    profiler.start(options(tmp_path, start_step=7, num_steps=1, profile_id="abc"))
    assert profiler.state == "waiting"
    wave(profiler, 2)  # passes 4, 5, 6
    assert profiler.state == "waiting"
    wave(profiler, 2)  # passes 7, 8, 9: stops at the end of the wave although one was asked for
    (path,) = finish(profiler)
    assert path.name == "abc-TP-0.trace.json.gz"
    assert spans(path) == {"flashrec.prefill": 1, "flashrec.decode": 2}


def test_stop_without_num_steps_and_a_second_stop_is_harmless(tmp_path: Path) -> None:
    profiler = Profiler()
    profiler.start(options(tmp_path))
    wave(profiler, 1)
    profiler.stop()
    profiler.stop()
    (path,) = finish(profiler)
    assert spans(path) == {"flashrec.prefill": 1, "flashrec.decode": 1}


def test_by_stage_writes_a_file_for_each_stage(tmp_path: Path) -> None:
    profiler = Profiler()
    profiler.start(options(tmp_path, num_steps=2, profile_by_stage=True, profile_prefix="s"))
    wave(profiler, 2)
    extend, decode = finish(profiler)
    assert (extend.name, decode.name) == ("s-TP-0-EXTEND.trace.json.gz", "s-TP-0-DECODE.trace.json.gz")
    assert spans(extend) == {"flashrec.prefill": 1}
    assert spans(decode) == {"flashrec.decode": 2}


def test_a_graph_of_several_steps_counts_each(tmp_path: Path) -> None:
    profiler = Profiler()
    profiler.start(options(tmp_path, num_steps=3))
    profiler.on_forward("prefill")
    profiler.on_forward("decode", passes=2)
    profiler.on_wave_end()
    finish(profiler)
    assert profiler.forward_passes == 3


def test_spans_of_other_threads_are_recorded(tmp_path: Path) -> None:
    """The engine thread starts the profiler; the tokeniser's thread must show all the same."""
    profiler = Profiler()

    def engine() -> None:
        profiler.start(options(tmp_path))
        helper = threading.Thread(target=tokenise)
        helper.start()
        helper.join()
        profiler.stop()

    def tokenise() -> None:
        with trace_range("flashrec.tokenize"):
            torch.ones(2) + 1

    thread = threading.Thread(target=engine)
    thread.start()
    thread.join()
    (path,) = finish(profiler)
    assert spans(path) == {"flashrec.tokenize": 1}


def test_a_taken_prefix_is_not_overwritten(tmp_path: Path) -> None:
    profiler = Profiler()
    for _ in range(2):
        profiler.start(options(tmp_path, num_steps=1, profile_prefix="same", profile_id="id2"))
        wave(profiler, 1)
        finish(profiler)
    names = sorted(entry.name for entry in tmp_path.iterdir())
    assert names == ["same-TP-0.trace.json.gz", "same-id2-TP-0.trace.json.gz"]


def test_a_second_start_is_refused(tmp_path: Path) -> None:
    profiler = Profiler()
    profiler.start(options(tmp_path, start_step=100))
    with pytest.raises(ProfilerStateError, match="waiting"):
        profiler.start(options(tmp_path))
    profiler.stop()
    assert profiler.state == "idle"


def test_a_write_error_is_reported_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", full)
    profiler = Profiler()
    profiler.start(options(tmp_path, num_steps=1, profile_prefix="x"))
    wave(profiler, 1)
    assert profiler.wait(60)
    assert profiler.status()["error"] == "x-TP-0.trace.json.gz: [Errno 28] No space left on device"
    assert list(tmp_path.iterdir()) == []


def test_a_torch_that_cannot_start_is_said_so_and_harms_no_wave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(_: object) -> None:
        raise RuntimeError("CUPTI is in use")

    monkeypatch.setattr(torch.profiler.profile, "start", busy)
    profiler = Profiler()
    with pytest.raises(ProfilerStateError, match="CUPTI is in use"):
        profiler.start(options(tmp_path))
    assert profiler.state == "idle"
    profiler.start(options(tmp_path, start_step=2))
    wave(profiler, 2)
    assert profiler.state == "idle"
    assert profiler.status()["error"] == "RuntimeError: CUPTI is in use"
    assert profiler.forward_passes == 3


@pytest.mark.parametrize("by_stage", [False, True])
def test_a_torch_that_cannot_stop_harms_no_wave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_stage: bool
) -> None:
    real = torch.profiler.profile.stop

    def broken(recording: torch.profiler.profile) -> None:
        real(recording)
        raise UnicodeDecodeError("utf-8", b"\xa0", 0, 1, "invalid start byte")

    monkeypatch.setattr(torch.profiler.profile, "stop", broken)
    profiler = Profiler()
    profiler.start(options(tmp_path, num_steps=1, profile_by_stage=by_stage))
    wave(profiler, 2)
    assert profiler.state == "idle"
    assert str(profiler.status()["error"]).startswith("UnicodeDecodeError")
    assert profiler.forward_passes == 3


def test_nothing_is_imported_while_recording_starts(tmp_path: Path) -> None:
    """A module whose body runs inside the recording leaves the name of a freed code object in the trace."""
    script = (
        "import sys, torch\n"
        "from flashrec.torch_trace import start_recording\n"
        "real, before = torch.profiler.profile.start, set()\n"
        "def start(recording):\n"
        "    before.update(sys.modules); real(recording)\n"
        "torch.profiler.profile.start = start\n"
        "start_recording([torch.profiler.ProfilerActivity.CPU], with_stack=True, record_shapes=True).stop()\n"
        "sys.stdout.write(f'imported: {sorted(set(sys.modules) - before)}')\n"
    )
    environment = os.environ | {"PYTHONPATH": "engine"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, env=environment, check=True)
    assert done.stdout.endswith(b"imported: []"), done.stdout.decode()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_steps": 0}, "num_steps"),
        ({"start_step": -1}, "start_step"),
        ({"profile_prefix": "../x"}, "profile_prefix"),
        ({"profile_prefix": ".hidden"}, "profile_prefix"),
        ({"profile_id": "a/b"}, "profile_id"),
        ({"activities": ("RPD",)}, "activities"),
        ({"activities": ()}, "activities"),
    ],
)
def test_bad_options_name_the_field(tmp_path: Path, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        options(tmp_path, **changes)
    assert caught.value.field == field


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_gpu_alone_is_refused_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="activities"):
        Profiler().start(options(tmp_path, activities=("GPU",)))


def test_nvtx_ranges_nest_when_cuda_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr("flashrec.profiler._nvtx_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: calls.append(f"+{name}"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("-"))
    with pytest.raises(KeyError), trace_range("a"), trace_range("b"):
        raise KeyError
    assert calls == ["+a", "+b", "-", "-"]


def test_off_no_record_function_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(_: str) -> None:
        raise AssertionError("record_function was entered with no profiler running")

    monkeypatch.setattr("flashrec.profiler.autograd_profiler.record_function", planted)
    with trace_range("flashrec.idle"):
        pass
