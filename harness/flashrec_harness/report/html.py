"""``report.html``: one file that needs no network, in light and dark, wide and narrow."""

from __future__ import annotations

from functools import lru_cache
from importlib import resources
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from flashrec_harness.outcome import Check, Outcome
from flashrec_harness.report import svg
from flashrec_harness.report.model import RunReport

_TEMPLATES = ("report.html.j2", "style.css.j2", "page.html.j2")
_ORDER = (Outcome.FAIL, Outcome.INVALID, Outcome.INCONCLUSIVE, Outcome.NOT_RUN, Outcome.PASS)
_GLYPHS = {
    Outcome.PASS: "✓",
    Outcome.FAIL: "✕",
    Outcome.INCONCLUSIVE: "?",
    Outcome.INVALID: "!",
    Outcome.NOT_RUN: "–",
}


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
        "duration": format_duration,
        "is_number": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
        "is_outcome": lambda value: value in set(Outcome),
    }
    environment.globals |= {"glyphs": _GLYPHS, "attention": needs_attention}
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
    """What a reader must see first: everything that is neither a pass nor merely not run."""
    quiet = (Outcome.PASS, Outcome.NOT_RUN)
    return sorted((c for c in checks if c.outcome not in quiet), key=lambda c: _ORDER.index(c.outcome))


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
            counts=[(outcome, report.counts[outcome]) for outcome in _ORDER if report.counts[outcome]],
            tiers=[
                ("hard", "a difference refuses a comparison", report.environment.hard),
                ("soft", "a difference weakens it to a screening", report.environment.soft),
                ("info", "for people", report.environment.info),
            ],
        )
    )
