"""The memory of a rank over a step, by kind, as an SVG file: what `titanlite plan --svg` writes."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from titanlite.lab.memory import GIB, KINDS, Moment
from titanlite.log import printable
from titanlite.report.charts import ticks

WIDTH, HEIGHT = 900, 420
LEFT, RIGHT, TOP, BOTTOM = 58, 210, 40, 44  # margins around the areas; the kinds are named in the right one
COLORS = ("#1f6feb", "#d9600a", "#138a5e", "#a23bb8", "#a67c00", "#cf2f5b", "#0b8793")  # of KINDS
LINE = 20  # height of a line of text


def memory_svg(moments: Sequence[Moment], card_gib: float, title: str) -> str:
    """Areas of the kinds, stacked, with one column for each of a step's `moments` in the order of time. The
    dashed line is the memory of the GPU. The numbers beside the kinds are those at the peak."""
    peak = max(moments, key=lambda moment: moment.total)
    top_gib = max(peak.total / GIB, card_gib) * 1.04
    column = (WIDTH - LEFT - RIGHT) / len(moments)

    def at_y(gib: float) -> float:
        return HEIGHT - BOTTOM - gib / top_gib * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="13"><rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(LEFT, TOP - 16, title),
    ]
    for tick in ticks(0, top_gib, 6):
        parts.append(f'<path d="M{LEFT} {at_y(tick):.1f}H{WIDTH - RIGHT}" stroke="#d8dde3"/>')
        parts.append(_text(LEFT - 6, at_y(tick) + 4, f"{tick:g}", "end"))
    below = [0.0] * len(moments)
    for i, (kind, color) in enumerate(zip(KINDS, COLORS, strict=True)):
        above = [low + moment.sizes[kind] / GIB for low, moment in zip(below, moments)]
        edge = [_edge(column, j, at_y(gib)) for j, gib in enumerate(above)]
        back = [_edge(column, j, at_y(gib), reverse=True) for j, gib in enumerate(below)]
        points = " ".join([*edge, *reversed(back)])
        parts.append(f'<polygon id="{kind}" points="{points}" fill="{color}" fill-opacity="0.8"/>')
        y = HEIGHT - BOTTOM - i * LINE
        parts.append(f'<rect x="{WIDTH - RIGHT + 14}" y="{y - 10}" width="12" height="12" fill="{color}"/>')
        parts.append(_text(WIDTH - RIGHT + 32, y, f"{kind} {peak.sizes[kind] / GIB:.2f}"))
        below = above
    x = LEFT + column * (moments.index(peak) + 0.5)
    y = HEIGHT - BOTTOM - len(KINDS) * LINE
    parts += [
        _text(WIDTH - RIGHT + 14, y, f"GiB at the peak: {peak.total / GIB:.2f}"),
        f'<path d="M{x:.1f} {at_y(peak.total / GIB):.1f}V{HEIGHT - BOTTOM + 6}" stroke="#1c2128"/>',
        _text(x, HEIGHT - BOTTOM + 20, f"peak: {peak.name}", "end" if x > (LEFT + WIDTH) / 2 else "start"),
        f'<path d="M{LEFT} {at_y(card_gib):.1f}H{WIDTH - RIGHT}" stroke="#b42318" stroke-dasharray="6 4"/>',
        _text(LEFT + 6, at_y(card_gib) - 5, f"GPU {card_gib:.1f}"),
        _text(LEFT, HEIGHT - 6, "the last micro-batch of a step, from its forward to the optimizer step"),
    ]
    return "\n".join([*parts, "</svg>\n"])


def _edge(column: float, i: int, y: float, reverse: bool = False) -> str:
    """The two points of a column's upper or lower edge."""
    left, right = LEFT + column * i, LEFT + column * (i + 1)
    ends = (right, left) if reverse else (left, right)
    return " ".join(f"{x:.2f},{y:.2f}" for x in ends)


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(printable(text))}</text>'
