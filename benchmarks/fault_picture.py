"""The picture of a campaign of faults (fault_campaign.py), steps over time, and its table."""

from __future__ import annotations

from html import escape
from typing import Any

WIDTH, HEIGHT = 980, 460
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 120, 60  # margins of the plot
TEXT, LINE, LOST, AGAIN, GREY = "#202124", "#1a73e8", "#f6aea9", "#fde293", "#5f6368"
NAMES = {
    "rank": "a rank killed", "ranks": "all ranks of a node killed", "launcher": "a launcher killed",
    "node": "a node and its memory lost", "frozen": "a node frozen, then killed",
}  # fmt: skip


def picture(campaign: dict[str, Any]) -> str:
    """An SVG of a campaign of a result."""
    curves = [list(zip(points[::2], points[1::2])) for points in campaign["curve"]]
    end_s = max(at for curve in curves for at, _ in curve)
    last = max(step for curve in curves for _, step in curve)

    def x(at_s: float) -> str:
        return f"{LEFT + (WIDTH - LEFT - RIGHT) * at_s / end_s:.1f}"

    def y(step: float) -> str:
        return f"{HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * step / last:.1f}"

    def band(from_s: float, to_s: float, fill: str) -> str:
        width, height = float(x(to_s)) - float(x(from_s)), HEIGHT - TOP - BOTTOM
        return f'<rect x="{x(from_s)}" y="{TOP}" width="{width:.1f}" height="{height}" fill="{fill}"/>'

    def text(at_x: float | str, at_y: float | str, words: str, more: str = "") -> str:
        return f'<text x="{at_x}" y="{at_y}" {more}>{escape(words)}</text>'

    shapes = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>']
    for fault in campaign["faults"]:
        shapes.append(band(fault["time"], fault["time"] + fault["seconds"], LOST))
    reached = 0
    for curve in curves:  # steps up to `reached` are trained again
        again_s = next((at for at, step in curve if step >= reached), curve[-1][0])
        if reached and again_s > curve[0][0]:
            shapes.append(band(curve[0][0], again_s, AGAIN))
        reached = curve[-1][1]
    for step in ticks(last):
        shapes.append(f'<path d="M{LEFT} {y(step)} H{WIDTH - RIGHT}" stroke="#dadce0"/>')
        shapes.append(text(LEFT - 8, float(y(step)) + 4, f"{step:,}", 'text-anchor="end"'))
    for at_s in ticks(end_s):
        shapes.append(text(x(at_s), HEIGHT - BOTTOM + 20, f"{at_s:,} s", 'text-anchor="middle"'))
    for curve in curves:
        points = " ".join(f"{x(at)},{y(step)}" for at, step in curve)
        shapes.append(f'<polyline points="{points}" fill="none" stroke="{LINE}" stroke-width="2.5"/>')
    beside, level = -99.0, 0  # the mark before, and how far its number is above the plot
    for i, fault in enumerate(campaign["faults"], start=1):
        at = x(fault["time"])
        level = level + 1 if float(at) - beside < 16 else 0
        beside, top = float(at), TOP - 8 - 14 * level
        dashed = f'stroke="{TEXT}" stroke-dasharray="3 3"'
        shapes.append(f'<path d="M{at} {top + 3} V{HEIGHT - BOTTOM}" {dashed}/>')
        shapes.append(text(at, top, str(i), 'text-anchor="middle" font-weight="600"'))
    weights = "equal" if campaign["equal"]["weights"] else "differ"
    title = (
        f"{len(campaign['faults'])} faults in {campaign['seconds']:.0f} s: {campaign['goodput']:.1%} of the "
        f"time in steps that count; weights {weights}"
    )
    faults = [f"{i} {NAMES[fault['kind']]}" for i, fault in enumerate(campaign["faults"], start=1)]
    half = (len(faults) + 1) // 2
    shapes += [
        text(LEFT, 26, title, 'font-size="16" font-weight="600"'),
        text(LEFT, 50, "; ".join(faults[:half]), 'font-size="12.5"'),
        text(LEFT, 70, "; ".join(faults[half:]), 'font-size="12.5"'),
        text(LEFT - 8, TOP - 11, "step", 'text-anchor="end"'),
        f'<rect x="{LEFT}" y="{HEIGHT - 24}" width="14" height="14" fill="{LOST}"/>',
        text(LEFT + 20, HEIGHT - 12, "from a fault to the next logged step", 'font-size="12.5"'),
        f'<rect x="{LEFT + 260}" y="{HEIGHT - 24}" width="14" height="14" fill="{AGAIN}"/>',
        text(LEFT + 280, HEIGHT - 12, "steps trained again", 'font-size="12.5"'),
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="14" fill="{TEXT}">'
    )
    return "\n".join([head, "<title>A campaign of faults</title>", *shapes, "</svg>", ""])


def table(campaign: dict[str, Any]) -> str:
    """The faults of a campaign as a table in Markdown."""
    rows = ["| | fault | at | until the next step | steps trained again |", "| --- | --- | --- | --- | --- |"]
    for i, fault in enumerate(campaign["faults"], start=1):
        times = f"{fault['time']:.0f} s | {fault['seconds']:.1f} s"
        rows.append(f"| {i} | {NAMES[fault['kind']]} | {times} | {fault['repeated']} |")
    return "\n".join(rows)


def ticks(highest: float) -> list[int]:
    """Four to nine round numbers from 0 to `highest`."""
    size = next(n * 10**k for k in range(9) for n in (1, 2, 5) if highest / (n * 10**k) < 9)
    return list(range(0, int(highest) + 1, size))
