"""Which device the harness judges on: detection, xdist pinning, a lock per GPU, and foreign processes."""

from __future__ import annotations

import csv
import fcntl
import io
import os
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import psutil

_QUERY_TIMEOUT_S = 20.0
_HELD = "FLASHREC_DEVICE_LOCK_HELD"


class DeviceBusyError(Exception):
    """Another harness run holds the device's lock."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as the driver names it; ``memory_mib`` is its total memory in MiB."""

    index: int
    uuid: str
    name: str
    memory_mib: int
    driver: str
    compute_capability: str


def _nvidia_smi(*arguments: str) -> list[list[str]]:
    """Rows of an ``nvidia-smi --query-...`` call; none where the tool is missing or answers an error."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        answer = subprocess.run(
            [tool, *arguments, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_QUERY_TIMEOUT_S,
            check=True,
        )
    except (subprocess.SubprocessError, OSError):
        return []
    return [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(answer.stdout)) if row]


@lru_cache(maxsize=1)
def gpus() -> tuple[Gpu, ...]:
    """Every NVIDIA GPU of this machine, whatever ``CUDA_VISIBLE_DEVICES`` says; does not import torch."""
    rows = _nvidia_smi("--query-gpu=index,uuid,name,memory.total,driver_version,compute_cap")
    return tuple(
        Gpu(
            index=int(row[0]),
            uuid=row[1],
            name=row[2],
            memory_mib=int(float(row[3])),
            driver=row[4],
            compute_capability=row[5],
        )
        for row in rows
        if len(row) == 6
    )


def visible_gpu(environ: MutableMapping[str, str] | None = None) -> Gpu | None:
    """The GPU that this process would use, ``None`` where there is none or all are hidden."""
    environ = os.environ if environ is None else environ
    present = gpus()
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return present[0] if present else None
    first = chosen.split(",")[0].strip()
    return next((gpu for gpu in present if first in (str(gpu.index), gpu.uuid)), None)


def has_gpu() -> bool:
    """Whether a CUDA device is visible to this process."""
    return visible_gpu() is not None


def missing_gpu_reason() -> str:
    """Why a GPU check is not run, in the words reports and skips use."""
    if not gpus():
        return "no GPU on this machine"
    return f"no GPU visible: CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r}"


def device_slug(device_name: str) -> str:
    """A folder name for a device: ``"NVIDIA H200"`` becomes ``"nvidia-h200"``."""
    words = "".join(c if c.isalnum() else " " for c in device_name.lower()).split()
    return "-".join(words)


def pin_xdist_worker(environ: MutableMapping[str, str] | None = None) -> str | None:
    """Give an xdist worker one GPU, before CUDA starts in it: worker ``gw<i>`` takes GPU ``i mod count``.

    Returns what ``CUDA_VISIBLE_DEVICES`` was set to, ``None`` outside xdist or without a GPU.
    """
    environ = os.environ if environ is None else environ
    worker = environ.get("PYTEST_XDIST_WORKER", "")
    if not worker.startswith("gw") or not gpus():
        return None
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    choices = listed.split(",") if listed is not None else [str(gpu.index) for gpu in gpus()]
    environ["CUDA_VISIBLE_DEVICES"] = choices[int(worker[2:]) % len(choices)].strip()
    return environ["CUDA_VISIBLE_DEVICES"]


@contextmanager
def device_lock(name: str | None = None, *, directory: Path | None = None) -> Iterator[None]:
    """Hold the device alone for as long as the context lasts; other harness runs on it are refused.

    ``name`` defaults to the visible GPU's uuid; without a GPU nothing is locked. Child processes inherit the
    hold. The lock is the kernel's (``flock``), so a run that dies leaves none behind. Raises
    :class:`DeviceBusyError` at once if another run holds it.
    """
    gpu = visible_gpu()
    lock_name = name or (gpu.uuid if gpu else None)
    if lock_name is None or os.environ.get(_HELD) == lock_name:
        yield
        return
    path = (directory or Path(tempfile.gettempdir())) / f"flashrec-{lock_name}.lock"
    with path.open("a+", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            holder = handle.read().strip() or "unknown"
            raise DeviceBusyError(
                f"device {lock_name} is in use by process {holder} ({path}); wait for it to end"
            ) from None
        handle.seek(0)
        handle.truncate()
        handle.write(str(os.getpid()))
        handle.flush()
        os.environ[_HELD] = lock_name
        try:
            yield
        finally:
            del os.environ[_HELD]


def stolen_s() -> float:
    """CPU seconds, over all cores since the machine started, in which a virtual machine wanted to run and its host ran
    something else; 0 on a machine that has no host, or one that does not tell."""
    return float(getattr(psutil.cpu_times(), "steal", 0.0))


def foreign_processes(ours: Collection[int] = ()) -> list[str]:
    """Processes that compute on the visible GPU, as ``"<pid> <name>"``, but this one and ``ours``; empty without a GPU.

    Inside a container the driver may list processes by the host's numbers, or none at all: a process of
    ours can then look foreign, which errs on the side of saying so.
    """
    gpu = visible_gpu()
    if gpu is None:
        return []
    rows = _nvidia_smi("--query-compute-apps=gpu_uuid,pid,process_name")
    known = {str(pid) for pid in (os.getpid(), *ours)}
    return [f"{row[1]} {row[2]}" for row in rows if len(row) == 3 and row[0] == gpu.uuid and row[1] not in known]
