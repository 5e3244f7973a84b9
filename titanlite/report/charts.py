"""Charts as data for page.js, which draws them: lines that keep their minima and maxima, and marks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from titanlite.log import printable
from titanlite.report.estimates import Floats

MAX_POINTS = 1500  # per line


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
    lines: Sequence[Line]
    unit: str = ""
    note: str = ""
    marks: Sequence[Mark] = ()
    band: float = 0.0
    x_label: str = "tokens"


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


def data(chart: Chart) -> dict[str, Any]:
    """Return the chart as plain data for page.js."""
    lines = [
        {"run": line.run, "style": line.style, "x": _rounded(line.x, 9), "y": _rounded(line.y, 6)}
        for line in chart.lines
    ]
    marks = [{"run": m.run, "x": m.x, "kind": m.kind, "text": printable(m.text)} for m in chart.marks]
    about = {"title": printable(chart.title), "xLabel": chart.x_label, "unit": chart.unit, "band": chart.band}
    return about | {"lines": lines, "marks": marks}


def _rounded(values: Floats, digits: int) -> list[float]:
    return [float(f"{value:.{digits}g}") for value in values.tolist()]
