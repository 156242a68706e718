"""How many random examples are drawn and from which seed: the same ones each time, or new ones every night."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass

import hypothesis

from flashrec.errors import ConfigError

BUDGETS = ("ci", "nightly")
VARIABLE = "FLASHREC_HYPOTHESIS"
"""Names the budget where ``--hypothesis-budget`` does not."""

_MORE = 5
"""Times as many examples of a kernel at night."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """``examples`` to draw; without a ``seed`` the same ones each time."""

    examples: int
    seed: int | None = None

    def __str__(self) -> str:
        return "the same examples each time" if self.seed is None else f"drawn with seed {self.seed}"


def _profile(budget: str) -> str:
    """Hypothesis has a profile *ci* of its own, which it loads wherever it believes to be in one."""
    return f"flashrec-{budget}"


def of_environment() -> str:
    """The budget that the environment names, *ci* without one. Raises :class:`ConfigError` for one that is none."""
    named = os.environ.get(VARIABLE) or BUDGETS[0]
    if named not in BUDGETS:
        raise ConfigError(f"{VARIABLE}={named}: name one of {', '.join(BUDGETS)}")
    return named


def load(budget: str) -> None:
    """Make a budget this process's hypothesis profile."""
    common = hypothesis.settings(deadline=None, print_blob=True)
    hypothesis.settings.register_profile(_profile("ci"), common, derandomize=True, max_examples=50, database=None)
    hypothesis.settings.register_profile(_profile("nightly"), common, derandomize=False, max_examples=1000)
    hypothesis.settings.load_profile(_profile(budget))


def is_nightly() -> bool:
    """Whether the budget of this process is *nightly*: its profile's, or in a command the environment's."""
    loaded = hypothesis.settings.get_current_profile_name()
    known = [budget for budget in BUDGETS if _profile(budget) == loaded]
    return (known or [of_environment()])[0] == "nightly"


def seed_of(asked: int) -> int:
    """``asked``; at night, where that is 0, a new one."""
    return asked or (secrets.randbelow(2**31 - 1) + 1 if is_nightly() else 0)


def drawing(examples: int, seed: int) -> Drawing:
    """``examples``, or more at night; a ``seed`` of 0 is none."""
    return Drawing(_MORE * examples if is_nightly() else examples, seed or None)
