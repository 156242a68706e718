"""What a run ran on, in three tiers: a hard difference refuses a comparison, a soft one weakens it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from flashrec.device import processor_name
from flashrec_harness import hardware

_SAMPLED_ABOVE_BYTES = 256 * 2**20
_SAMPLE_BLOCKS = 64
_SAMPLE_BYTES = 64 * 2**10
_SOFT_PACKAGES = ("torch", "triton", "flashinfer-python", "transformers", "numpy")


@dataclass(frozen=True, slots=True)
class Commit:
    """The checkout a run came from; ``sha`` is empty outside a git checkout or before the first commit."""

    sha: str
    dirty: bool
    subject: str = ""
    when: str = ""

    @property
    def label(self) -> str:
        """Short hash, with ``+dirty`` for uncommitted changes."""
        return (self.sha[:9] or "no commit") + ("+dirty" if self.dirty else "")


@dataclass(slots=True)
class Environment:
    """``hard`` differences refuse a comparison, ``soft`` allow screening only, ``info`` is for people."""

    commit: Commit
    hard: dict[str, Any] = field(default_factory=dict)
    soft: dict[str, Any] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain data for ``env.json``."""
        return asdict(self)


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20, check=True
        )
    except (subprocess.SubprocessError, OSError):
        return ""
    return done.stdout.strip()


def engine_folder() -> Path:
    """Where ``flashrec`` is imported from: with ``PYTHONPATH`` at a work tree, that tree and not ours."""
    import flashrec

    return Path(flashrec.__path__[0])


def git_commit(root: Path | None = None) -> Commit:
    """The commit of the checkout that holds ``root`` (default: the engine that this process imports)."""
    root = root or engine_folder()
    sha = _git(root, "rev-parse", "--verify", "--quiet", "HEAD")
    return Commit(
        sha=sha,
        dirty=bool(_git(root, "status", "--porcelain")),
        subject=_git(root, "log", "-1", "--format=%s") if sha else "",
        when=_git(root, "log", "-1", "--format=%cI") if sha else "",
    )


def _digest_file(path: Path, into: hashlib._Hash) -> None:
    size = path.stat().st_size
    into.update(f"{path.name}:{size}".encode())
    with path.open("rb") as handle:
        if size <= _SAMPLED_ABOVE_BYTES:
            while block := handle.read(2**20):
                into.update(block)
            return
        for index in range(_SAMPLE_BLOCKS):
            handle.seek((size - _SAMPLE_BYTES) * index // (_SAMPLE_BLOCKS - 1))
            into.update(handle.read(_SAMPLE_BYTES))


def content_digest(*paths: Path) -> str:
    """16 hex digits of the SHA-256 over the files' names, sizes and contents.

    Of a file above 256 MiB, 64 blocks of 64 KiB spread evenly over it stand for the whole: a retrained
    checkpoint changes every block, and hashing 15 GB before each run would cost more than the run.
    """
    digest = hashlib.sha256()
    for path in sorted(paths, key=lambda p: p.name):
        _digest_file(path, digest)
    return digest.hexdigest()[:16]


def model_digest(model_path: Path) -> str:
    """Content digest of a checkpoint: its config, tokenizer and weights."""
    return content_digest(
        *model_path.glob("*.safetensors"), *model_path.glob("config.json"), *model_path.glob("tokenizer.json")
    )


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def collect(
    *,
    model_path: Path | None = None,
    sid_vocab_file: Path | None = None,
    hard: dict[str, Any] | None = None,
    root: Path | None = None,
) -> Environment:
    """The environment of this process; ``hard`` adds a suite's own keys (workload, flags) to that tier."""
    gpu = hardware.visible_gpu()
    device = gpu.name if gpu else processor_name()
    tier_hard: dict[str, Any] = {
        "device": device,
        "device_memory_mib": gpu.memory_mib if gpu else None,
        "cpu_cores": None if gpu else len(os.sched_getaffinity(0)),
    }
    if model_path is not None:
        tier_hard["model"] = model_digest(model_path)
    if sid_vocab_file is not None:
        tier_hard["catalog"] = content_digest(sid_vocab_file)
    soft = {name: _version(name) for name in ("torch", "triton", "flashinfer-python", "transformers", "numpy")}
    soft |= {"driver": gpu.driver if gpu else None, "python": platform.python_version()}
    info = {
        "platform": platform.platform(),
        "cpu": processor_name(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "gpus": [g.name for g in hardware.gpus()],
        "executable": Path(sys.executable).name,
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "boot_id": boot_id(),
    }
    return Environment(git_commit(root), tier_hard | (hard or {}), soft, info)


def boot_id() -> str:
    """Identifies this boot of this machine, so that two invocations on it can be told from two sessions."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        return ""
    return text.strip()[:8]


def differing_keys(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The keys whose values differ, or that only one side has, with both values; sorted by key."""
    missing = object()
    return {
        key: (ours.get(key), theirs.get(key))
        for key in sorted(ours.keys() | theirs.keys())
        if ours.get(key, missing) != theirs.get(key, missing)
    }


def dump(environment: Environment) -> str:
    """``env.json``'s text: sorted keys, indented."""
    return json.dumps(environment.as_json(), indent=2, sort_keys=True, default=str) + "\n"
