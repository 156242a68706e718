"""Every session runs in the interpreter that runs nox: one environment, nothing installed here.

``nox -s parity -- --model-path DIR`` passes what follows ``--`` on to ``flashrec-harness parity``; with
``tests``, ``lint`` and ``types`` it goes to pytest, ruff and mypy.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import nox

nox.options.sessions = ["lint", "types", "tests"]
nox.options.default_venv_backend = "none"

_ROOT = Path(__file__).parent
_ENV = {
    # Two OpenMP threads in each of several processes on two cores wait for each other: 70 times slower there.
    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    "PYTHONPATH": os.pathsep.join(
        [str(_ROOT / "engine"), str(_ROOT / "harness"), *filter(None, [os.environ.get("PYTHONPATH")])]
    ),
}


def _python(session: nox.Session, *arguments: str) -> None:
    session.run(sys.executable, *arguments, env=_ENV, external=True)


def _suite(session: nox.Session, name: str) -> None:
    _python(session, "-m", "flashrec_harness", name, *session.posargs)


@nox.session
def kernel(session: nox.Session) -> None:
    """Every device kernel equals its reference."""
    _suite(session, "kernel")


@nox.session
def parity(session: nox.Session) -> None:
    """The same choices and scores as SGLang, transformers and the oracle."""
    _suite(session, "parity")


@nox.session
def determinism(session: nox.Session) -> None:
    """The same bits, N >= 120, across processes."""
    _suite(session, "determinism")


@nox.session
def perf(session: nox.Session) -> None:
    """Noise-banded regression against stored baselines."""
    _suite(session, "perf")


@nox.session
def trace(session: nox.Session) -> None:
    """The device did what we think it did."""
    _suite(session, "trace")


@nox.session
def accept(session: nox.Session) -> None:
    """The acceptance list for one checkpoint; without arguments, for the bundled one."""
    _suite(session, "accept")


@nox.session
def faults(session: nox.Session) -> None:
    """Every planted fault is caught, and the clean engine is green."""
    _suite(session, "faults")


@nox.session
def tests(session: nox.Session) -> None:
    """All tests: units, each suite's own with its negative controls; those that measure time run by themselves."""
    workers = _workers()
    if session.posargs or not workers:
        _python(session, "-m", "pytest", *workers, *session.posargs)
        return
    _python(session, "-m", "pytest", *workers, "-m", "not alone")
    _python(session, "-m", "pytest", "-m", "alone")


def _workers() -> tuple[str, ...]:
    """pytest-xdist's workers: up to four on a CPU, file by file; none beside a GPU, which they would share.

    In the order of collection: xdist's own begins with the files of most tests, and ends with the slowest.
    """
    count = min(4, os.cpu_count() or 1)
    if shutil.which("nvidia-smi") or count == 1:
        return ()
    return ("-n", str(count), "--dist", "loadfile", "--no-loadscope-reorder")


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, rules and format."""
    _python(session, "-m", "ruff", "check", *session.posargs)
    _python(session, "-m", "ruff", "format", "--check", *session.posargs)


@nox.session
def types(session: nox.Session) -> None:
    """mypy, strict."""
    _python(session, "-m", "mypy", *session.posargs)
