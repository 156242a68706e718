"""``report.html``: one file that needs no network, in light and dark, wide and narrow."""

from __future__ import annotations

from functools import lru_cache
from importlib import resources
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from flashrec_harness.outcome import Check, Outcome, worst
from flashrec_harness.report import grid, svg
from flashrec_harness.report.model import RunReport

_TEMPLATES = ("report.html.j2", "style.css.j2", "page.html.j2")
_ORDER = (Outcome.FAIL, Outcome.INVALID, Outcome.INCONCLUSIVE, Outcome.KNOWN, Outcome.NOT_RUN, Outcome.PASS)
_GLYPHS = {
    Outcome.PASS: "✓",
    Outcome.FAIL: "✕",
    Outcome.INCONCLUSIVE: "?",
    Outcome.INVALID: "!",
    Outcome.NOT_RUN: "–",
    Outcome.KNOWN: "~",
}


_MEANINGS = {
    Outcome.PASS: "shown to be right",
    Outcome.FAIL: "a fault was found",
    Outcome.INCONCLUSIVE: "measured, but the data do not decide",
    Outcome.INVALID: "the measurement broke its own rules and says nothing",
    Outcome.NOT_RUN: "not judged here, which is not a pass",
    Outcome.KNOWN: "a fault that is listed, with an owner and a date",
}
_RED = (Outcome.FAIL, Outcome.INVALID, Outcome.INCONCLUSIVE)


@lru_cache(maxsize=1)
def _environment() -> Environment:
    folder = resources.files("flashrec_harness.report") / "templates"
    sources = {name: (folder / name).read_text(encoding="utf-8") for name in _TEMPLATES}
    environment = Environment(
        loader=DictLoader(sources),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "slug": slug,
        "cell": format_cell,
        "plot": lambda plot: Markup(svg.render(plot)),
        "grid": lambda one: Markup(grid.render(one)),
        "duration": format_duration,
        "is_number": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
        "is_outcome": lambda value: value in set(Outcome),
    }
    environment.globals |= {
        "glyphs": _GLYPHS,
        "meanings": _MEANINGS,
        "red_outcomes": _RED,
        "anchor": lambda check: f"{slug(check.suite)}-{slug(check.name)}",
        "worst": lambda checks: worst(check.outcome for check in checks),
    }
    return environment


def slug(text: str) -> str:
    """A CSS class or anchor for a name: ``"not run"`` becomes ``"not-run"``."""
    return "-".join("".join(c if c.isalnum() else " " for c in text.lower()).split())


def format_cell(value: Any) -> str:
    """A table cell: floats to four significant digits, ``None`` as a dash."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(format_cell(one) for one in value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def format_duration(seconds: float) -> str:
    """``95.2`` becomes ``1 min 35 s``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def needs_attention(checks: list[Check]) -> list[Check]:
    """What a reader must see first: what is red, the gravest first."""
    return sorted((c for c in checks if c.outcome in _RED), key=lambda c: _ORDER.index(c.outcome))


def not_judged(checks: list[Check]) -> dict[str, list[Check]]:
    """What is not run, by its reason."""
    found: dict[str, list[Check]] = {}
    for check in checks:
        if check.outcome is Outcome.NOT_RUN:
            found.setdefault(check.reason, []).append(check)
    return found


def render_page(title: str, body: str, *, head: str = "") -> str:
    """Any self-contained page in the reports' style; ``body`` and ``head`` are trusted HTML."""
    return _environment().get_template("page.html.j2").render(title=title, body=Markup(body), head=Markup(head))


def render(report: RunReport) -> str:
    """The whole report as one HTML document."""
    every = [check for checks in report.suites.values() for check in checks]
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            report=report,
            red=needs_attention(every),
            missing=not_judged(every),
            foreign=report.environment.info.get("other processes on the device"),
            counts=[(outcome, report.counts[outcome]) for outcome in _ORDER if report.counts[outcome]],
            tiers=[
                ("hard", "a difference refuses a comparison", report.environment.hard),
                ("soft", "a difference weakens it to a screening", report.environment.soft),
                ("info", "for people", report.environment.info),
            ],
        )
    )
