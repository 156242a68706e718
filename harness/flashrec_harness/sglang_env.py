"""SGLang's own Python environment on a CPU: made on demand and cached, or named by the user."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from flashrec_harness.children import last_error
from flashrec_harness.servers import HEALTH_TIMEOUT_S, RunningServer, started_server

PYTHON_VARIABLE = "FLASHREC_SGLANG_PYTHON"
URL_VARIABLE = "SGLANG_BEAM_URL"
NO_SGLANG = "none"
"""Value of ``FLASHREC_SGLANG_PYTHON`` under which SGLang is left out, and nothing is installed."""

_FILES = Path(__file__).parent / "sglang"
_REQUIREMENTS = _FILES / "requirements-cpu.txt"
_INSTALL_TIMEOUT_S = 1800.0
_IMPORT_TIMEOUT_S = 180.0
_READY = "ready.json"
_PROBE = "import cpu_shims, sglang; from sglang.srt.beam_search import joint_select; print(sglang.__version__)"


class SglangUnavailableError(RuntimeError):
    """SGLang cannot run here. The message says why in one line."""


def cache_directory() -> Path:
    """``$XDG_CACHE_HOME/flashrec``, or ``~/.cache/flashrec``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "flashrec"


def named_url() -> str | None:
    """The running server that ``SGLANG_BEAM_URL`` names, if it does."""
    return os.environ.get(URL_VARIABLE) or None


def sglang_python(*, create: bool = True) -> Path:
    """The interpreter that can import SGLang.

    ``FLASHREC_SGLANG_PYTHON`` wins (``none`` leaves SGLang out); otherwise the cached environment, made on the first
    call (about 45 s on
    two cores and 1.5 GB with a CPU torch, 2026-11-29) unless ``create`` is false.

    Raises:
        SglangUnavailableError: it is left out, the named interpreter does not import SGLang, or the installation
            failed.
    """
    named = os.environ.get(PYTHON_VARIABLE)
    if named == NO_SGLANG:
        raise SglangUnavailableError(f"left out by {PYTHON_VARIABLE}={NO_SGLANG}")
    if named:
        _probe(Path(named), f"{PYTHON_VARIABLE}={named}")
        return Path(named)
    home = cache_directory() / f"sglang-{_environment_key()}"
    python = home / "bin" / "python"
    if (home / _READY).exists():
        return python
    if not create:
        raise SglangUnavailableError(f"no SGLang environment at {home}, and none may be made here")
    with _exclusive(home.with_suffix(".lock")):
        if not (home / _READY).exists():
            _create(home, python)
    return python


@contextmanager
def sglang_server(
    model_path: Path,
    *,
    trie_file: Path | None = None,
    max_rows: int = 600,
    pool_tokens: int = 32768,
    arguments: Sequence[str] = (),
    log_dir: Path | None = None,
    timeout_s: float = HEALTH_TIMEOUT_S,
) -> Iterator[RunningServer]:
    """A live SGLang server on the CPU in float32, with beam search over HTTP.

    ``trie_file`` masks its logits to catalogs (:mod:`flashrec_harness.sglang.sgl_sid.qwen3_sid`).
    ``pool_tokens`` bounds its KV pool; without a bound it reserves 17 GB and takes 40 s more to start.

    Raises:
        SglangUnavailableError: there is no interpreter that can run it.
        ServerStartError: it did not become healthy.
    """
    python = sglang_python()

    def command(port: int) -> Sequence[str]:
        return (
            *(str(python), str(_FILES / "launch.py"), "--model-path", str(model_path)),
            *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
            *("--dtype", "float32", "--page-size", "1", "--max-total-tokens", str(pool_tokens)),
            *("--max-running-requests", str(max_rows), "--host", "127.0.0.1", "--port", str(port)),
            *(("--disable-radix-cache",) if trie_file is not None else ()),
            *arguments,
        )

    with started_server(
        command, name="sglang", env=_server_environment(trie_file), log_dir=log_dir, timeout_s=timeout_s
    ) as server:
        yield server


def _server_environment(trie_file: Path | None) -> Mapping[str, str]:
    # One thread: the server is three processes, and a tiny model gains nothing from more.
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(_FILES), "PYTHONNOUSERSITE": "1"}
    if trie_file is not None:
        environment |= {"SGLANG_EXTERNAL_MODEL_PACKAGE": "sgl_sid", "SID_TRIE": str(trie_file.resolve())}
    return environment


def _environment_key() -> str:
    digest = hashlib.sha256(_REQUIREMENTS.read_bytes())
    digest.update(f"{sys.implementation.cache_tag} {sys.base_prefix}".encode())
    return digest.hexdigest()[:12]


@contextmanager
def _exclusive(lock: Path) -> Iterator[None]:
    """One creator at a time; the others wait and then find the environment ready."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _create(home: Path, python: Path) -> None:
    shutil.rmtree(home, ignore_errors=True)
    print(f"installing SGLang for a CPU in {home} (once; a minute or two)", file=sys.stderr)
    began = time.monotonic()
    _run([sys.executable, "-m", "venv", str(home)], "make its environment")
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # SGLang's own requirements name GPU packages that a CPU server never imports.
    _run([*install, "--no-deps", "-r", str(_REQUIREMENTS)], "install its packages")
    if not _imports(python, "import torch"):
        # A torch built for GPUs loads shared libraries that come as its dependencies.
        _run([*install, _pinned("torch")], "install its torch with dependencies")
    version = _probe(python, str(home))
    ready = {"sglang": version, "seconds": round(time.monotonic() - began, 1)}
    (home / _READY).write_text(json.dumps(ready) + "\n", encoding="utf-8")


def _pinned(package: str) -> str:
    lines = _REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith(f"{package}=="))


def _run(command: Sequence[str], purpose: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        raise SglangUnavailableError(f"could not {purpose}: {last_error(error.stderr or error.stdout)}") from error
    except subprocess.TimeoutExpired as error:
        raise SglangUnavailableError(f"could not {purpose} within {_INSTALL_TIMEOUT_S:.0f} s") from error


def _imports(python: Path, statement: str) -> bool:
    return subprocess.run([str(python), "-c", statement], capture_output=True, check=False).returncode == 0


@cache
def _probe(python: Path, what: str) -> str:
    """SGLang's version as ``python`` imports it."""
    if not python.exists():
        raise SglangUnavailableError(f"{what}: no such interpreter")
    try:
        done = subprocess.run(
            [str(python), "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=_IMPORT_TIMEOUT_S,
            env={**os.environ, **_server_environment(None)},
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SglangUnavailableError(f"{what}: importing SGLang took over {_IMPORT_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        raise SglangUnavailableError(f"{what}: SGLang does not import ({last_error(done.stderr)})")
    return done.stdout.strip().splitlines()[-1]
