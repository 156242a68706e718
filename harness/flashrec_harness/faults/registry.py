"""The list of faults, which suite must see each, and how one is switched on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

from flashrec.errors import ConfigError
from flashrec_harness.determinism.axes import AXES
from flashrec_harness.outcome import Outcome
from flashrec_harness.planting import PLANT_VARIABLE

Patch = Callable[[], AbstractContextManager[object]]

LEDGERS = "ledgers agree where outputs do"


@dataclass(frozen=True, slots=True)
class Catch:
    """A suite that must see a fault: its check whose name holds ``check`` comes out as ``outcome``.

    ``only`` narrows the suite to what can see it and ``fp8`` gives it an FP8 checkpoint. ``module`` stands for the
    suite's command where that would need a quiet machine. ``gpu`` says that only a GPU shows it.
    """

    suite: str
    check: str
    outcome: Outcome = Outcome.FAIL
    only: str = ""
    fp8: bool = False
    module: str = ""
    gpu: bool = False


@dataclass(frozen=True, slots=True)
class Fault:
    """``axis`` is the determinism axis that shows it and ``tensor`` what the ledger names as the first thing to
    differ; empty where the suite or the ledger is blind to it."""

    name: str
    what: str
    catches: tuple[Catch, ...]
    patch: Patch
    axis: str = ""
    tensor: str = ""


FAULTS: dict[str, Fault] = {}


def fault(
    name: str, *catches: Catch, axis: str = "", tensor: str = ""
) -> Callable[[Callable[[], Iterator[None]]], Callable[[], Iterator[None]]]:
    """Register a generator that patches the engine or the harness, yields and restores it; its docstring says what
    is wrong. ``catches`` are the suites that must go red beside the determinism ``axis``."""

    def register(function: Callable[[], Iterator[None]]) -> Callable[[], Iterator[None]]:
        what = " ".join((function.__doc__ or "").split())
        everyone = (*((determinism(axis),) if axis else ()), *catches)
        FAULTS[name] = Fault(name, what, everyone, contextmanager(function), axis, tensor)
        return function

    return register


def determinism(axis: str) -> Catch:
    """The determinism suite's check of ``axis``; ``ledger`` is the one over the ledgers themselves."""
    if axis == "ledger":
        return Catch("determinism", LEDGERS, only="mixed")
    return Catch("determinism", "mixed waves" if axis == "mixed" else AXES[axis].title, only=axis)


def kernel(name: str) -> Catch:
    """The kernel suite's check of the registered kernel ``name``."""
    return Catch("kernel", f"{name} (", only=name)


def parity(group: str) -> Catch:
    """The parity suite's checks against the float64 oracle in a score space."""
    return Catch("parity", f"float64 oracle, {group}", only=f"float64 oracle, {group}")


def soak(check: str, outcome: Outcome = Outcome.FAIL) -> Catch:
    """A check of the soak: minutes of mixed load on a server."""
    return Catch("soak", check, outcome)


def overload(check: str, outcome: Outcome = Outcome.FAIL) -> Catch:
    """A check of the overload: a multiple of a server's capacity."""
    return Catch("overload", check, outcome)


def on_gpu(check: str, *, fp8: bool = False) -> Catch:
    """A check of the trace suite that takes device events."""
    return Catch("trace", check, fp8=fp8, gpu=True)


@contextmanager
def plant(*names: str) -> Iterator[None]:
    """Patch this process with the named faults.

    Raises :class:`ConfigError` for an unknown name, or one that the environment does not name.
    """
    allowed = os.environ.get(PLANT_VARIABLE, "").split(",")
    with ExitStack() as stack:
        for name in names:
            if name not in FAULTS:
                raise ConfigError(f"plant: no fault {name!r}; there are {', '.join(sorted(FAULTS))}")
            if name not in allowed:
                raise ConfigError(f"plant: {PLANT_VARIABLE} does not name {name!r}")
            stack.enter_context(FAULTS[name].patch())
        yield
