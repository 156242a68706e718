"""Planted faults: how a run is told to carry one, and how it says so.

The faults themselves live in :mod:`flashrec_harness.faults`, which can be imported only where the environment
names at least one: a normal run cannot reach them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer

from flashrec_harness.outcome import Check, Outcome

PLANT_VARIABLE = "FLASHREC_PLANT_FAULTS"
"""Names of the faults to plant, separated by commas; child processes and servers inherit it."""


def planted_names() -> tuple[str, ...]:
    """The faults that this run carries, in the order they were named."""
    return tuple(name for name in os.environ.get(PLANT_VARIABLE, "").split(",") if name)


@contextmanager
def planted() -> Iterator[None]:
    """Patch the engine of this process with the faults that the environment names; usually none.

    Raises :class:`~flashrec.errors.ConfigError` for a name that is not registered.
    """
    names = planted_names()
    if not names:
        yield
        return
    from flashrec_harness import faults

    with faults.plant(*names):
        yield


def confession(suite: str) -> list[Check]:
    """What a suite puts first when faults are planted, so that no such run can pass for a verdict."""
    names = planted_names()
    if not names:
        return []
    reason = f"planted on purpose: {', '.join(names)}"
    return [Check(suite, "engine unmodified", Outcome.INVALID, "the checks below judge a faulty engine", reason=reason)]


def _remember(names: Sequence[str] | None) -> Sequence[str] | None:
    if names:
        os.environ[PLANT_VARIABLE] = ",".join(names)
        with planted():
            pass
    return names


Plant = Annotated[
    list[str] | None,
    typer.Option(
        "--plant", help="Patch the engine with a registered fault, to see the suite fail.", callback=_remember
    ),
]
"""The command line's option: setting the environment is all that it does, once the names are known to exist."""
