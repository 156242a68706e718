"""The list of faults and how one is switched on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

from flashrec.errors import ConfigError
from flashrec_harness.planting import PLANT_VARIABLE

Patch = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class Fault:
    """``caught_by`` names the suites that must go red, ``axis`` the determinism axis that shows it and ``tensor``
    what the ledger names as the first thing to differ; empty where the suite or the ledger is blind to it."""

    name: str
    what: str
    caught_by: tuple[str, ...]
    patch: Patch
    axis: str = ""
    tensor: str = ""


FAULTS: dict[str, Fault] = {}


def fault(
    name: str, *, caught_by: tuple[str, ...], axis: str = "", tensor: str = ""
) -> Callable[[Callable[[], Iterator[None]]], Callable[[], Iterator[None]]]:
    """Register a generator that patches the engine, yields and restores it; its docstring says what is wrong."""

    def register(function: Callable[[], Iterator[None]]) -> Callable[[], Iterator[None]]:
        what = " ".join((function.__doc__ or "").split())
        FAULTS[name] = Fault(name, what, caught_by, contextmanager(function), axis, tensor)
        return function

    return register


@contextmanager
def plant(*names: str) -> Iterator[None]:
    """Patch this process's engine with the named faults.

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
