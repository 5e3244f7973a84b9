"""Charts: lines that keep their minima and maxima, as SVG and as data for page.js.

The SVG is complete without JavaScript. page.js draws the same chart at the width of the window, with
logarithmic axes, zoom and values under the pointer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from titanlite.log import printable
from titanlite.report.estimates import Floats

MAX_POINTS = 1500  # per line
WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 40  # margins around the lines; as in page.js
NUM_COLORS = 8  # .run0 to .run7 in page.css
FEW = 60  # a line of at most so many points also shows the points


@dataclass(frozen=True)
class Line:
    """A line of a run. `raw`: thin, under a smoothed one."""

    run: int
    x: Floats
    y: Floats
    style: Literal["raw", "smooth", "plain"] = "plain"


@dataclass(frozen=True)
class Mark:
    """Something that happened at one place of the x axis."""

    run: int
    x: float
    kind: Literal["resumed", "saved", "skipped", "accepted", "spike", "rewound", "stage"]
    text: str


@dataclass(frozen=True)
class Chart:
    """A chart. `band`: half the height of the noise around 0, shown as an area; 0: none."""

    title: str
    x_label: str
    lines: Sequence[Line]
    unit: str = ""
    note: str = ""
    marks: Sequence[Mark] = field(default_factory=list)
    band: float = 0.0


def downsample(x: Floats, y: Floats, max_points: int = MAX_POINTS) -> tuple[Floats, Floats]:
    """Return at most `max_points` of the finite points: the lowest and the highest of each bucket of
    consecutive points, and the first and the last point, in order."""
    is_finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[is_finite], y[is_finite]
    if len(x) <= max_points:
        return x, y
    edges = np.linspace(0, len(x), (max_points - 2) // 2 + 1).astype(int)
    kept = {0, len(x) - 1}
    for start, end in pairwise(edges):
        kept |= {start + int(np.argmin(y[start:end])), start + int(np.argmax(y[start:end]))}
    at = np.array(sorted(kept))
    return x[at], y[at]


def short(value: float) -> str:
    """Return a number with at most three significant digits and a suffix, such as 1.25M. As in page.js."""
    size = abs(value)
    if size >= 1e15 or (0 < size < 1e-3):
        return f"{value:.2e}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e").replace(".00e", "e")
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if size >= limit:
            return f"{value / limit:.3g}{suffix}" if size / limit < 1000 else f"{value / limit:.0f}{suffix}"
    return f"{value:.3g}" if size < 100 else f"{value:.4g}"


def ticks(low: float, high: float, num: int) -> list[float]:
    """Return about `num` round numbers between two numbers."""
    rough = (high - low) / max(num, 1)
    if not rough > 1e-300:
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((factor * power for factor in (1, 2, 5) if factor * power >= rough), 10 * power)
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def extent(parts: Sequence[Floats]) -> tuple[float, float]:
    """Return the lowest and the highest value, a little apart if they are equal."""
    parts = [part for part in parts if len(part)]
    if not parts:
        return 0.0, 1.0
    low, high = min(float(p.min()) for p in parts), max(float(p.max()) for p in parts)
    margin = 0.5 * abs(low) or 0.5
    return (low, high) if high > low else (low - margin, high + margin)


def limits(chart: Chart) -> tuple[float, float, float, float]:
    """Return the ranges of x and y."""
    x0, x1 = extent([line.x for line in chart.lines])
    y0, y1 = extent(
        [*(line.y for line in chart.lines), np.array([-chart.band, chart.band][: 2 * bool(chart.band)])]
    )
    margin = 0.04 * (y1 - y0)
    return x0, x1, y0 - margin, y1 + margin


def svg(chart: Chart) -> str:
    """Return the chart as SVG with linear axes."""
    x0, x1, y0, y1 = limits(chart)

    def at_x(x: float) -> float:
        return LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)

    def at_y(y: float) -> float:
        return HEIGHT - BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)

    label = escape(printable(f"{chart.title}, by {chart.x_label}"), quote=True)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">']
    if chart.band:
        top, bottom = at_y(chart.band), at_y(-chart.band)
        parts.append(
            f'<rect class="band" x="{LEFT}" y="{top:.1f}" width="{WIDTH - LEFT - RIGHT}" '
            f'height="{bottom - top:.1f}"/>'
        )
    for tick in ticks(y0, y1, 5):
        y = at_y(tick)
        parts.append(
            f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
            f'<text class="tick" text-anchor="end" x="{LEFT - 6}" y="{y + 4:.1f}">{short(tick)}</text>'
        )
    for tick in ticks(x0, x1, 6):
        parts.append(
            f'<text class="tick" text-anchor="middle" x="{at_x(tick):.1f}" y="{HEIGHT - BOTTOM + 16}">'
            f"{short(tick)}</text>"
        )
    parts.append(f'<text class="tick" text-anchor="end" x="{WIDTH - RIGHT}" y="{HEIGHT - 6}">')
    parts.append(f"{escape(chart.x_label)}</text>")
    for mark in chart.marks:
        parts.append(_mark(mark, at_x(mark.x)))
    for line in chart.lines:
        color = f"run{line.run % NUM_COLORS}"
        points = [f"{at_x(x):.1f} {at_y(y):.1f}" for x, y in zip(line.x, line.y)]
        parts.append(f'<path class="line {line.style} {color}" d="M{"L".join(points)}"/>' if points else "")
        for point in points if len(points) <= FEW and line.style == "plain" else []:
            center_x, center_y = point.split()
            parts.append(f'<circle class="{color}" cx="{center_x}" cy="{center_y}" r="2.5"/>')
    return "".join(parts) + "</svg>"


def _mark(mark: Mark, x: float) -> str:
    bottom = HEIGHT - BOTTOM
    shape = {
        "saved": f"M{x:.1f} {bottom}v-8",
        "skipped": f"M{x - 3:.1f} {TOP}l6 6m0 -6l-6 6",
        "accepted": f"M{x - 3:.1f} {TOP + 3}h6m-3 -3v6",
        "spike": f"M{x - 4:.1f} {TOP}h8l-4 7z",
        "resumed": f"M{x:.1f} {TOP}V{bottom}",
        "rewound": f"M{x:.1f} {TOP}V{bottom}",
        "stage": f"M{x:.1f} {TOP}V{bottom}",
    }[mark.kind]
    return (
        f'<path class="mark {mark.kind} run{mark.run % NUM_COLORS}" d="{shape}">'
        f"<title>{escape(printable(mark.text))}</title></path>"
    )


def data(chart: Chart) -> dict[str, Any]:
    """Return the chart as plain data for page.js."""
    return {
        "title": printable(chart.title),
        "xLabel": chart.x_label,
        "unit": chart.unit,
        "band": _rounded(chart.band),
        "lines": [
            {
                "run": line.run,
                "style": line.style,
                "x": [_rounded(x, 9) for x in line.x],
                "y": [_rounded(y) for y in line.y],
            }
            for line in chart.lines
        ],
        "marks": [
            {"run": m.run, "x": _rounded(m.x, 9), "kind": m.kind, "text": printable(m.text)}
            for m in chart.marks
        ],
    }


def _rounded(value: float, digits: int = 6) -> float | int:
    number = float(f"{float(value):.{digits}g}")
    return int(number) if number.is_integer() and abs(number) < 1e15 else number
