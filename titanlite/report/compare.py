"""Compare runs on the terminal: verdicts, losses at equal tokens, times, and the keys that differ.

The first run is the one that the others are compared with. `titanlite report` writes the long form.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from titanlite import commands
from titanlite.config.component import ConfigError
from titanlite.log import printable
from titanlite.report.charts import short
from titanlite.report.estimates import Series, smooth
from titanlite.report.facts import all_verdicts, changed_keys, facts
from titanlite.report.recorded_run import RecordedRun, names_of, read_run
from titanlite.report.timeline import ORDER, Timeline, duration, timeline
from titanlite.report.verdicts import nats
from titanlite.table import table

SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)  # of the tokens that all runs have trained on


def main(argv: Sequence[str]) -> int:
    """Print the comparison."""
    options = commands.parser("compare").read(argv)
    if len(options.runs) < 2:
        raise ConfigError("name at least two runs; `titanlite report RUN` reports on one")
    runs = [read_run(folder, name) for folder, name in zip(options.runs, names_of(options.runs))]
    print(comparison(runs, options.price_per_gpu_hour), end="")
    return 0


@np.errstate(all="ignore")  # values that are not finite are left out
def comparison(runs: Sequence[RecordedRun], price: float | None = None) -> str:
    """Return the comparison of runs; the first one is the one that the others are compared with. `price`: of
    a GPU hour."""
    parts = [_verdicts(runs), _facts(runs, price), _losses(runs), _times(runs), _keys(runs), _changes(runs)]
    parts.append("\n".join(f"{run.name}: {problem}" for run in runs for problem in run.problems))
    return printable("\n\n".join(part for part in parts if part)) + "\n"


def _verdicts(runs: Sequence[RecordedRun]) -> str:
    lines = []
    for title, verdicts, note in all_verdicts(runs):
        lines.append(title)
        for verdict in verdicts:
            lines.append(f"  {verdict.name}: {verdict.headline}")
            lines += [f"      {line}" for line in verdict.evidence.splitlines()]
        if note:
            lines.append(f"  {note}")
    return "\n".join(lines)


def _facts(runs: Sequence[RecordedRun], price: float | None) -> str:
    columns = [facts(run, price) for run in runs]
    rows = [[key, *(column[key] for column in columns)] for key in columns[0]]
    return table([["", *(run.name for run in runs)], *(row for row in rows if any(row[1:]))])


def _losses(runs: Sequence[RecordedRun]) -> str:
    """The smoothed losses at equal numbers of tokens, and the differences to the first run."""
    curves = [_smoothed(run.series("train/loss").finite()) for run in runs]
    if any(len(curve) < 2 for curve in curves):
        return ""
    start = max(curve.tokens[0] for curve in curves)
    end = min(curve.tokens[-1] for curve in curves)
    if start >= end:
        return "The runs have no tokens in common at which their losses could be compared."
    rows = [
        [
            "loss at tokens",
            *(run.name for run in runs),
            *(f"{run.name} - {runs[0].name}" for run in runs[1:]),
        ]
    ]
    for tokens in [share * end for share in SHARES if share * end >= start]:
        losses = [float(np.interp(tokens, curve.tokens, curve.values)) for curve in curves]
        deltas = [nats(loss - losses[0]) for loss in losses[1:]]
        rows.append([short(tokens), *(f"{loss:.4f}" for loss in losses), *deltas])
    note = (
        "Each is the median of the logged losses around it: 3% of the run, at least 15; up to half of these "
        "are missing at both ends."
    )
    return f"{table(rows)}\n{note}"


def _smoothed(loss: Series) -> Series:
    at, medians = smooth(loss)
    return Series(loss.steps[at], loss.tokens[at], medians)


def _times(runs: Sequence[RecordedRun]) -> str:
    spent = [timeline(run) for run in runs]
    causes = [cause for cause in ORDER if any(cause in times.seconds for times in spent)]
    if not causes:
        return ""
    rows = [[cause, *(_with_share(cause, times) for times in spent)] for cause in causes]
    notes = [f"{run.name}: {note}" for run, times in zip(runs, spent) for note in times.notes]
    return "\n".join([table([["time", *(run.name for run in runs)], *rows]), *notes])


def _with_share(cause: str, times: Timeline) -> str:
    """The time of one cause, such as `12.5 s (3.1%)`."""
    seconds = times.seconds.get(cause, 0.0)
    return f"{duration(seconds)} ({seconds / times.total_s:.1%})" if seconds else ""


def _keys(runs: Sequence[RecordedRun]) -> str:
    changed = changed_keys(runs)
    if changed is None:
        return "Keys that differ are not known: a job.toml is missing or damaged."
    if not changed:
        return "No key differs."
    head = ["keys that differ", *(run.name for run in runs)]
    return table([head, *([key, *values] for key, values in changed.items())])


def _changes(runs: Sequence[RecordedRun]) -> str:
    """The resumes at which keys changed."""
    resumes = [(run.name, event) for run in runs for event in run.happened("resumed") if event.about]
    return "\n".join(f"{name}: {event.text}" for name, event in resumes)
