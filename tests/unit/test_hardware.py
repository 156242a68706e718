"""GPU detection, xdist pinning, the per-GPU lock: with a driver that is simulated."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from flashrec_harness import hardware

SMI = """#!/bin/sh
case "$1" in
*compute-apps*) printf 'GPU-b, 99999, /usr/bin/other\\nGPU-a, 88888, elsewhere\\n' ;;
*) printf '0, GPU-a, NVIDIA H200, 143771, 580.1, 9.0\\n1, GPU-b, NVIDIA H200, 143771, 580.1, 9.0\\n' ;;
esac
"""


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(SMI)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    hardware.gpus.cache_clear()
    yield
    hardware.gpus.cache_clear()


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("visible", "uuid"),
    [(None, "GPU-a"), ("1", "GPU-b"), ("GPU-b", "GPU-b"), ("1,0", "GPU-b"), ("", None), ("7", None)],
)
def test_visible_gpu_follows_cuda_visible_devices(visible: str | None, uuid: str | None) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    found = hardware.visible_gpu(environ)
    assert (found.uuid if found else None) == uuid


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("worker", "visible", "pinned"),
    [
        ("gw0", None, "0"),
        ("gw1", None, "1"),
        ("gw2", None, "0"),
        ("gw1", "1", "1"),
        ("gw1", "1,0", "0"),
        ("", None, None),
    ],
)
def test_xdist_workers_get_one_gpu_each(worker: str, visible: str | None, pinned: str | None) -> None:
    environ = {"PYTEST_XDIST_WORKER": worker}
    if visible is not None:
        environ["CUDA_VISIBLE_DEVICES"] = visible
    assert hardware.pin_xdist_worker(environ) == pinned
    assert environ.get("CUDA_VISIBLE_DEVICES") == (pinned or visible)


@pytest.mark.usefixtures("two_gpus")
def test_foreign_processes_are_those_of_the_visible_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert hardware.foreign_processes() == ["99999 /usr/bin/other"]
    assert hardware.foreign_processes({99999}) == []
    assert hardware.foreign_processes({9999}) == ["99999 /usr/bin/other"]


def test_no_driver_means_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    hardware.gpus.cache_clear()
    assert hardware.gpus() == ()
    assert not hardware.has_gpu()
    assert hardware.missing_gpu_reason() == "no GPU on this machine"
    assert hardware.foreign_processes() == []
    hardware.gpus.cache_clear()


HOLD = """
import sys, pathlib
from flashrec_harness.hardware import device_lock
with device_lock("test", directory=pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_lock_is_exclusive_between_processes_and_dies_with_its_holder(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(hardware.DeviceBusyError, match=f"in use by process {holder.pid}"),
            hardware.device_lock("test", directory=tmp_path),
        ):
            pass
        holder.kill()
        holder.wait()
    with hardware.device_lock("test", directory=tmp_path):
        pass


def test_a_child_inherits_the_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHREC_DEVICE_LOCK_HELD", raising=False)
    with hardware.device_lock("test", directory=tmp_path):
        done = subprocess.run([sys.executable, "-c", HOLD, str(tmp_path)], input="", capture_output=True, text=True)
        assert done.stdout == "held\n"


def test_slugs_name_folders() -> None:
    assert hardware.device_slug("NVIDIA H200") == "nvidia-h200"


@pytest.mark.parametrize(("told", "seconds"), [({"user": 9.0, "steal": 2.5}, 2.5), ({"user": 9.0}, 0.0)])
def test_what_a_host_takes_is_read_where_it_is_told(
    monkeypatch: pytest.MonkeyPatch, told: dict[str, float], seconds: float
) -> None:
    monkeypatch.setattr(hardware.psutil, "cpu_times", lambda: SimpleNamespace(**told))
    assert hardware.stolen_s() == seconds
