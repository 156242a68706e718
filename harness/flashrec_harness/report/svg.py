"""Plots as inline SVG: no scripts, no fonts to load, colours from the page's CSS (light and dark)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from flashrec_harness.outcome import Band, Plot, Series

_WIDTH, _HEIGHT = 640, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 78, 16, 14, 56
_COLOURS = 6


class _Scale:
    """Maps data ``low..high`` to pixels ``start..stop``, linearly or by logarithm."""

    def __init__(self, low: float, high: float, start: float, stop: float, *, log: bool = False) -> None:
        self.log = log
        self.low, self.high = low, high
        self.start, self.stop = start, stop

    def __call__(self, value: float) -> float:
        low, high = (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        at = math.log10(value) if self.log else value
        return self.start + (at - low) / (high - low) * (self.stop - self.start)


def nice_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers that cover ``low..high``: steps of 1, 2 or 5 times a power of ten."""
    if high <= low:
        return [low]
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [10.0**p for p in powers if low <= 10.0**p <= high]
    return ticks if len(ticks) >= 2 else nice_ticks(low, high)


def short_number(value: float) -> str:
    """A number for an axis: at most four significant digits, thousands as ``12k``."""
    if value and abs(value) < 1e-3:
        return f"{value:.0e}"
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k" if abs(value) < 1e6 else f"{value / 1e6:g}M"
    return f"{value:.4g}"


def _extent(values: Sequence[float], *, log: bool, pad: float = 0.06) -> tuple[float, float]:
    finite = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
    if not finite:
        return (1.0, 10.0) if log else (0.0, 1.0)
    low, high = min(finite), max(finite)
    if log:
        return (low / 1.3, high * 1.3)
    margin = (high - low) * pad or abs(high) * pad or 1.0
    return low - margin, high + margin


def _text(x: float, y: float, label: str, css: str, anchor: str = "middle", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{css}" text-anchor="{anchor}"{extra}>{escape(label)}</text>'


def _band(band: Band, y: _Scale) -> str:
    top = min(max(y(band.high), _TOP), _HEIGHT - _BOTTOM)
    bottom = min(max(y(band.low), _TOP), _HEIGHT - _BOTTOM)
    rect = (
        f'<rect class="band" x="{_LEFT}" y="{top:.1f}" width="{_WIDTH - _LEFT - _RIGHT}"'
        f' height="{max(bottom - top, 1):.1f}"/>'
    )
    return rect + (_text(_WIDTH - _RIGHT - 6, top + 17, band.label, "tick", "end") if band.label else "")


def _css(prefix: str, colour: int, series: Series) -> str:
    return f"{prefix}{colour % _COLOURS}" + (" faint" if series.faint else "")


def _marks(series: Series, colour: int, x: _Scale, y: _Scale) -> str:
    css = _css("s", colour, series)
    points = [
        (x(px), y(py)) for px, py in zip(series.x, series.y, strict=True) if math.isfinite(py) and (py > 0 or not y.log)
    ]
    if series.style == "line":
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        return f'<polyline class="{css} line" points="{path}"/>'
    if series.style == "bars":
        half = min(26.0, 0.3 * (_WIDTH - _LEFT - _RIGHT) / max(len(points), 1))
        base = y.start
        return "".join(
            f'<rect class="{css} mark" x="{px - half:.1f}" y="{min(py, base):.1f}" width="{2 * half:.1f}"'
            f' height="{abs(base - py):.1f}" rx="2"/>'
            for px, py in points
        )
    radius = 4 if series.faint else 6
    return "".join(f'<circle class="{css} mark" cx="{px:.1f}" cy="{py:.1f}" r="{radius}"/>' for px, py in points)


def _axes(plot: Plot, x: _Scale, y: _Scale) -> list[str]:
    parts = []
    for value in _log_ticks(y.low, y.high) if y.log else nice_ticks(y.low, y.high):
        at = y(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(_text(_LEFT - 8, at + 5, short_number(value), "tick", "end"))
    base = _HEIGHT - _BOTTOM
    if plot.x_ticks:
        every = math.ceil(len(plot.x_ticks) / 8)
        for index, label in enumerate(plot.x_ticks):
            if index % every == 0:
                parts.append(_text(x(index), base + 21, label, "tick"))
    else:
        parts += [_text(x(v), base + 21, short_number(v), "tick") for v in nice_ticks(x.low, x.high, 7)]
    middle = (_TOP + base) / 2
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, plot.x_label, "label"))
    parts.append(_text(15, middle, plot.y_label, "label", extra=f' transform="rotate(-90 15 {middle:.1f})"'))
    return parts


def _legend(plot: Plot) -> str:
    named = [(i, s) for i, s in enumerate(plot.series) if s.name]
    if len(named) < 2:
        return ""
    keys = "".join(f'<span class="key"><i class="{_css("k", i, s)}"></i>{escape(s.name)}</span>' for i, s in named)
    return f'<div class="legend">{keys}</div>'


def render(plot: Plot) -> str:
    """A ``<figure>`` with title, legend and the chart. Colours are the page's ``--c0`` .. ``--c5``."""
    ys = [v for s in plot.series for v in s.y] + [v for b in plot.bands for v in (b.low, b.high)]
    if any(s.style == "bars" for s in plot.series) and not plot.log_y:
        ys.append(0.0)
    low, high = _extent(ys, log=plot.log_y)
    if ys and min(ys) >= 0 and low < 0:
        low = 0.0
    y = _Scale(low, high, _HEIGHT - _BOTTOM, _TOP, log=plot.log_y)
    if plot.x_ticks:
        x = _Scale(-0.5, len(plot.x_ticks) - 0.5, _LEFT, _WIDTH - _RIGHT)
    else:
        x = _Scale(*_extent([v for s in plot.series for v in s.x], log=False, pad=0.03), _LEFT, _WIDTH - _RIGHT)
    order = sorted(enumerate(plot.series), key=lambda pair: not pair[1].faint)
    body = "".join([_band(b, y) for b in plot.bands] + _axes(plot, x, y) + [_marks(s, i, x, y) for i, s in order])
    title = escape(plot.title)
    return (
        f"<figure><figcaption>{title}</figcaption>{_legend(plot)}"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}">{body}</svg></figure>'
    )
