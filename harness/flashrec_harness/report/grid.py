"""Heat maps as HTML tables: the figure in each cell, shaded by its logarithm, readable without colour."""

from __future__ import annotations

import math
from html import escape

from flashrec_harness.outcome import Grid
from flashrec_harness.report.svg import short_number

_STRONGEST = 46
"""Percent of the highest figure's shade: text stays readable in light and dark."""


def _shade(value: float, lowest: float, highest: float) -> int:
    """By ratio to the lowest figure, on a scale that spans a factor of two at least: noise stays pale."""
    if lowest <= 0:
        return 0
    return round(_STRONGEST * math.log(value / lowest) / max(math.log(highest / lowest), math.log(2)))


def _cell(value: float | None, lowest: float, highest: float) -> str:
    if value is None:
        return '<td class="num">–</td>'
    colour = f"color-mix(in srgb, var(--c0) {_shade(value, lowest, highest)}%, transparent)"
    return f'<td class="num" style="background:{colour}">{short_number(value)}</td>'


def render(grid: Grid) -> str:
    """A ``<figure>`` with the table; the corner names both settings."""
    known = [value for row in grid.values for value in row if value is not None]
    ends = min(known, default=0.0), max(known, default=0.0)
    head = "".join(f'<th class="num">{escape(name)}</th>' for name in grid.columns)
    body = "".join(
        f'<tr><th class="num">{escape(name)}</th>{"".join(_cell(value, *ends) for value in row)}</tr>'
        for name, row in zip(grid.rows, grid.values, strict=True)
    )
    corner = f"{escape(grid.row_label)} ↓ {escape(grid.column_label)} →"
    return (
        f'<figure><figcaption>{escape(grid.title)}</figcaption><div class="scroll"><table class="grid">'
        f"<tr><th>{corner}</th>{head}</tr>{body}</table></div></figure>"
    )
