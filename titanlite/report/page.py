"""Write a report on one or several runs: one HTML file with verdicts, charts, samples and changed keys.

The first run is the one that the others are compared with. docs/report.md says what each verdict means.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from html import escape
from itertools import count
from pathlib import Path

import numpy as np

from titanlite import commands
from titanlite.config.paths import check_output_file
from titanlite.files import write_atomically
from titanlite.log import printable, tell
from titanlite.report.charts import Chart, data
from titanlite.report.facts import all_verdicts, changed_keys, facts
from titanlite.report.figures import ChartGroup, main_charts, other_charts
from titanlite.report.recorded_run import RecordedRun, names_of, read_run
from titanlite.report.timeline import duration, goodput_text, timeline
from titanlite.report.verdicts import Verdict

NUM_COLORS = 8  # .run0 to .run7 in page.css
MAX_SAMPLE_STEPS = 3  # the last steps with samples
MAX_CHARACTERS = 3000  # of one sample
MAX_EVENTS = 50  # the newest ones of each run


def main(argv: Sequence[str]) -> int:
    """Write the report."""
    options = commands.parser("report").read(argv)
    check_output_file(options.output)
    runs = [read_run(folder, name) for folder, name in zip(options.runs, names_of(options.runs))]
    write_atomically(options.output, report(runs, options.price_per_gpu_hour))
    for run in runs:
        for problem in run.problems:
            tell(f"{run.name}: {problem}")
    print(options.output)
    return 0


@np.errstate(all="ignore")  # values that cannot be drawn are left out
def report(runs: Sequence[RecordedRun], price: float | None = None) -> str:
    """Return the page on one or several runs. It refers to no other file, and has equal bytes for equal
    input. `price`: of a GPU hour."""
    groups = other_charts(runs)
    names = ", ".join(run.name for run in runs) if len(runs) <= 3 else f"{len(runs)} runs"
    charts, title = main_charts(runs), f"titanlite report: {names}"
    numbers = count()
    body = [
        f"<h1>{text(title)}</h1>",
        _legend(runs) if len(runs) > 1 else "",
        "<h2>Verdicts</h2>",
        _verdicts(runs),
        _problems(runs),
        "<h2>Runs</h2>",
        _facts(runs, price),
        "<h2>Charts</h2>",
        '<p class="faint">Drag over a chart to zoom in, double-click to see all of it again.</p>',
        "<noscript><p>The charts need JavaScript.</p></noscript>",
        '<div class="grid-of-charts">',
        *(_figure(chart, next(numbers)) for chart in charts),
        "</div>",
        _detail(groups, numbers),
        '<h2>Time</h2>\n<div class="columns">',
        *(_time(run, i) for i, run in enumerate(runs)),
        "</div>",
        _events(runs),
        _samples(runs),
        _changed_keys(runs),
    ]
    shown = [*charts, *(chart for group in groups for chart in group.charts)]
    content = {"runs": [printable(run.name) for run in runs], "charts": [data(chart) for chart in shown]}
    return _document(title, "\n".join(part for part in body if part), content)


def text(value: object) -> str:
    """Return a value as HTML text: markup is escaped, and control characters are shown as escapes."""
    return escape(printable(value), quote=True)


def _document(title: str, body: str, content: object) -> str:
    folder = Path(__file__).parent
    style = (folder / "page.css").read_text(encoding="utf-8")
    script = (folder / "page.js").read_text(encoding="utf-8")
    # Only this script runs, and nothing is loaded, even if some text had not been escaped.
    script_hash = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{script_hash}'"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n{body}\n"
        f'<script type="application/json" id="data">{_json(content)}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def _json(content: object) -> str:
    """Return JSON that cannot end the script element that holds it."""
    plain = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return plain.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _swatch(index: int) -> str:
    return f'<span class="swatch run{index % NUM_COLORS}"></span>'


def _legend(runs: Sequence[RecordedRun]) -> str:
    items = [f"<span>{_swatch(i)}{text(run.name)}</span>" for i, run in enumerate(runs)]
    return f'<p class="legend">{" ".join(items)}</p>'


def _verdicts(runs: Sequence[RecordedRun]) -> str:
    parts = []
    for i, (title, verdicts, note) in enumerate(all_verdicts(runs)):
        swatch = _swatch(i) if i < len(runs) else ""
        parts.append(f"<h3>{swatch}{text(title)}</h3>")
        items = "".join(_verdict(verdict) for verdict in verdicts)
        parts.append(f'<ul class="verdicts">{items}</ul>' if items else "")
        parts.append(f'<p class="faint">{text(note)}</p>' if note else "")
    return "\n".join(parts)


def _verdict(verdict: Verdict) -> str:
    evidence = text(verdict.evidence).replace("+-", "&plusmn;").replace("\n", "<br>")
    return (
        f'<li class="{verdict.weight}"><span class="badge">{text(verdict.name)}</span>'
        f'<strong>{text(verdict.headline)}</strong><br><span class="faint">{evidence}</span></li>'
    )


def _problems(runs: Sequence[RecordedRun]) -> str:
    items = [f"<li>{text(run.name)}: {text(problem)}</li>" for run in runs for problem in run.problems]
    return f"<h2>Gaps in the files</h2>\n<ul>{''.join(items)}</ul>" if items else ""


def _table(head: Iterable[str], rows: Iterable[tuple[str, Sequence[str]]], is_code: bool = False) -> str:
    """A table of escaped texts. The cells of `head` are HTML."""
    kind = ' class="code"' if is_code else ""
    heads = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(
        f"<tr><th>{text(name)}</th>{''.join(f'<td{kind}>{text(cell)}</td>' for cell in cells)}</tr>\n"
        for name, cells in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr>{heads}</tr></thead>\n<tbody>\n{body}</tbody></table></div>'
    )


def _heads(runs: Sequence[RecordedRun]) -> list[str]:
    return ["", *(f"{_swatch(i)}{text(run.name)}" for i, run in enumerate(runs))]


def _facts(runs: Sequence[RecordedRun], price: float | None) -> str:
    columns = [facts(run, price) for run in runs]
    rows = [(key, [column[key] for column in columns]) for key in columns[0]]
    return _table(_heads(runs), [(key, cells) for key, cells in rows if any(cells)])


def _figure(chart: Chart, number: int) -> str:
    unit = f'<span class="faint">{text(chart.unit)}</span>' if chart.unit else ""
    note = f'<p class="faint">{text(chart.note)}</p>' if chart.note else ""
    label = text(f"{chart.title}, by {chart.x_label}")
    return (
        f'<figure data-chart="{number}"><figcaption>{text(chart.title)} {unit}<span class="buttons"></span>'
        f'</figcaption><svg role="img" aria-label="{label}"></svg>{note}</figure>'
    )


def _detail(groups: Sequence[ChartGroup], numbers: Iterable[int]) -> str:
    if not groups:
        return ""
    parts = ["<h2>Detail</h2>"]
    for group in groups:
        figures = "\n".join(_figure(chart, number) for chart, number in zip(group.charts, numbers))
        more = f'<p class="faint">Not shown: {text(", ".join(group.too_many))}</p>' if group.too_many else ""
        num = len(group.charts) + len(group.too_many)
        size = f"{num} metrics" if num > 1 else "1 metric"
        parts.append(
            f'<details><summary>{text(group.name)} <span class="faint">{size}</span></summary>\n'
            f'<div class="grid-of-charts">\n{figures}\n</div>{more}</details>'
        )
    return "\n".join(parts)


def _events(runs: Sequence[RecordedRun]) -> str:
    """The newest events of each run, without saves."""
    parts = []
    for i, run in enumerate(runs):
        events = [event for event in run.events if event.kind not in ("saved", "started")]
        if not events:
            continue
        rows = [
            (f"{event.step:,}", [event.kind, event.details, event.time, "yes" if event.is_superseded else ""])
            for event in events[-MAX_EVENTS:][::-1]
        ]
        parts.append(f"<h3>{_swatch(i)}{text(run.name)}</h3>")
        parts.append(_table(["step", "event", "about", "time", "trained again later"], rows))
        if len(events) > MAX_EVENTS:
            parts.append(f'<p class="faint">{len(events) - MAX_EVENTS} older ones are in events.jsonl.</p>')
    return "\n".join(["<h2>Events</h2>", *parts]) if parts else ""


def _time(run: RecordedRun, index: int) -> str:
    spent = timeline(run)
    title = f"<h3>{_swatch(index)}{text(run.name)}</h3>"
    if not spent.total_s:
        return f'<div>{title}<p class="faint">The metrics have no times.</p></div>'
    bars, rows = [], []
    for i, (cause, seconds) in enumerate(spent.seconds.items()):
        share = seconds / spent.total_s
        bars.append(f'<span class="cause{i}" style="width:{100 * share:.2f}%" title="{text(cause)}"></span>')
        rows.append(
            f'<tr><td><span class="swatch cause{i}"></span>{text(cause)}</td><td>{duration(seconds)}</td>'
            f"<td>{share:.1%}</td></tr>"
        )
    bar, notes = "".join(bars), "".join(f'<p class="faint">{text(note)}</p>' for note in spent.notes)
    line = f"<p>goodput {text(goodput_text(run))}</p>"
    return f'<div>{title}{line}<div class="bar">{bar}</div><table>{"".join(rows)}</table>{notes}</div>'


def _samples(runs: Sequence[RecordedRun]) -> str:
    steps = sorted({step for run in runs for step in run.samples})
    if not steps:
        return ""
    parts = ["<h2>Samples</h2>"]
    for step in reversed(steps[-MAX_SAMPLE_STEPS:]):
        parts.append(f'<h3>Step {step}</h3><div class="columns">')
        for i, run in enumerate(runs):
            for sample in run.samples.get(step, []):
                left_out = len(sample) - MAX_CHARACTERS
                more = f'<p class="faint">{left_out:,} more characters</p>' if left_out > 0 else ""
                parts.append(
                    f'<div><p class="faint">{_swatch(i)}{text(run.name)}</p>'
                    f"<pre>{text(sample[:MAX_CHARACTERS])}</pre>{more}</div>"
                )
        parts.append("</div>")
    if len(steps) > MAX_SAMPLE_STEPS:
        parts.append(
            f'<p class="faint">{len(steps) - MAX_SAMPLE_STEPS} earlier steps are in samples.txt.</p>'
        )
    return "\n".join(parts)


def _changed_keys(runs: Sequence[RecordedRun]) -> str:
    if len(runs) < 2:
        return ""
    changed = changed_keys(runs)
    if changed is None:
        table = '<p class="faint">Not known: a job.toml is missing or damaged.</p>'
    else:
        table = _table(_heads(runs), changed.items(), is_code=True) if changed else "<p>None.</p>"
    return f"<h2>Keys that differ</h2>\n{table}"
