"""Facts on runs as text, for the tables of the page and of the terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from titanlite.report.charts import short
from titanlite.report.pairs import difference, pair_verdicts, weights_verdicts
from titanlite.report.recorded_run import MAX_NAMED, RecordedRun, listed
from titanlite.report.timeline import duration, goodput_text, gpu_hours, timeline
from titanlite.report.verdicts import MIN_POINTS, Verdict, verdicts_of

LR_CHANGE = re.compile(r"(?:^|; )optimizer\.lr (\S+) -> ([^\s;]+)")  # in a resume's `changed`
CHANGES_BATCH = re.compile(r"stages\.\d+\.(seq_len|global_batch_size)$|training\.batch_ramp\.\d")
NOT_COMPARED = {"job.dump_folder", "job.description"}


def facts(run: RecordedRun, price: float | None = None) -> dict[str, str]:
    """Return what a table says about a run; unknown facts are empty. `price`: of a GPU hour."""
    speeds = run.series("throughput/tokens_per_second").finite().values
    mfu = run.series("throughput/mfu").finite().values
    hours, tokens = timeline(run).hours, run.last("progress/total_tokens")
    return {
        "model": run.about[0] if run.about else _text(run.setting("model.name")),
        "steps": _steps(run),
        "logged": _logged(run),
        "tokens": short(tokens) if tokens is not None else "",
        "batch": _batch(run),
        "stages": listed([f"{s.label} from sequence {s.first_sequence:,}" for s in run.stages]),
        "optimizer": _optimizer(run),
        "layout": _text(run.env.get("layout", "")),
        "hardware": f"{_text(run.env.get('world_size'))} x {_text(run.env.get('device'))}" if run.env else "",
        "versions": ", ".join(
            f"{key} {run.env[key]}" for key in ("torch", "cuda", "python") if run.env.get(key)
        ),
        "training loss": _end_of_loss(run),
        "validation loss": _validation(run),
        "validation loss by source": _validation_by_source(run),
        "accuracy in tasks": _tasks(run),
        "throughput": f"{np.median(speeds):,.0f} tokens/s (median)" if len(speeds) else "",
        "MFU": f"{np.median(mfu):.1%} (median)" if len(mfu) else "",
        "time": duration(3600 * hours[-1]) if len(hours) else "",
        "goodput": goodput_text(run),
        "cost": _cost(gpu_hours(run), price),
        "resumed": _resumed(run),
    }


def all_verdicts(runs: Sequence[RecordedRun]) -> list[tuple[str, list[Verdict], str]]:
    """Return for each run, and for each later run against the first: its title, its verdicts, and a note if
    there are none or the losses were too few for some; otherwise the note is empty."""
    sections = []
    for run in runs:
        num = len(run.series("train/loss").finite())
        verdicts = verdicts_of(run)
        note = "" if verdicts else "No verdict: nothing in the metrics stands out of their noise."
        if num < MIN_POINTS:
            note = (
                f"Too few losses to tell noise from a trend, which takes {MIN_POINTS}: {_too_few(run, num)} "
                "Looked for were losses that are not finite, skipped steps, rewinds and the guard's spikes."
            )
        sections.append((run.name, verdicts, note))
    for run in runs[1:]:
        delta = difference(runs[0].series("train/loss"), run.series("train/loss"))
        title, note = (
            f"{run.name} against {runs[0].name}",
            "No verdict on the loss: the difference is neither clear nor small.",
        )
        if len(delta) < MIN_POINTS:
            points = f"{len(delta)} logged points at equal tokens"
            note = f"No verdict on the loss: {points}, {MIN_POINTS} are needed."
        verdicts = pair_verdicts((runs[0].name, run.name), delta, have_same_sequences(runs[0], run))
        weights = weights_verdicts(runs[0].weights_digests(), run.weights_digests())
        sections.append((title, [*weights, *verdicts], "" if verdicts else note))
    return sections


def _too_few(run: RecordedRun, num_finite: int) -> str:
    """How often a run was logged, and how often it would have had to be."""
    text, steps = f"the run was logged {len(run.records):,} times", run.last_step
    if num_finite < len(run.records):
        text += f", {num_finite} times with a finite loss"
    if len(run.records) >= MIN_POINTS:
        return f"{text}."
    if steps < MIN_POINTS:
        return f"{text} in {steps:,} steps, which are too few."
    return f"{text}; metrics.log_freq = {steps // MIN_POINTS} would have been often enough."


def have_same_sequences(first: RecordedRun, other: RecordedRun) -> bool:
    """Whether two runs trained on the same sequences in all steps that both have logged."""
    key = "data/batch_sha"
    hashes = {r["step"]: r[key] for r in first.records if isinstance(r.get(key), str)}
    pairs = [(hashes[r["step"]], r.get(key)) for r in other.records if r["step"] in hashes]
    return bool(pairs) and all(a == b for a, b in pairs)


def changed_keys(runs: Sequence[RecordedRun]) -> dict[str, list[str]] | None:
    """Return the keys of job.toml that differ between runs, each with its value in each run; None if they are
    not known of some run."""
    if not all(run.settings for run in runs):
        return None
    keys = sorted({key for run in runs for key in run.settings} - NOT_COMPARED)
    rows = {key: [_text(run.settings[key]) if key in run.settings else "" for run in runs] for key in keys}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def _cost(hours: float | None, price: float | None) -> str:
    if hours is None:
        return ""
    money = "" if price is None else f", {hours * price:,.2f} at {price:,.2f} per GPU hour"
    return f"{hours:,.3g} GPU hours{money}" if hours < 1000 else f"{hours:,.0f} GPU hours{money}"


def _text(value: Any) -> str:
    if value is None:
        return "unknown"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _optimizer(run: RecordedRun) -> str:
    """The optimizer and its peak learning rate, with the steps from which on a resume has changed it."""
    name, rates = run.setting("optimizer.name"), [_text(run.setting("optimizer.lr"))]
    resumes = [(event.step, str(event.about.get("changed", ""))) for event in run.happened("resumed")]
    changes = [(step, match) for step, text in resumes if (match := LR_CHANGE.search(text))]
    if changes:
        rates = [f"{match[2]} from step {step + 1:,}" for step, match in changes[-MAX_NAMED:]]
        rates.insert(0, changes[0][1][1])
    return f"{_text(name)}, peak learning rate {', '.join(rates)}" if name else ""


def _batch(run: RecordedRun) -> str:
    """The size of a step and whether it changes; global_batch_size = -1 follows from the number of ranks."""
    size, seq_len = run.setting("training.global_batch_size", int), run.setting("training.seq_len", int)
    if size is None or seq_len is None:
        return ""
    text = f"{size} sequences of {seq_len} tokens" if size > 0 else f"sequences of {seq_len} tokens"
    changes = any(CHANGES_BATCH.match(key) for key in run.settings)
    return f"{text}; changes during the run" if changes else text


def _steps(run: RecordedRun) -> str:
    last, planned = run.last_step, run.setting("training.steps", int)
    if planned is None:
        return f"{last:,}"
    return f"{last:,} of {planned:,}" if last <= planned else f"{last:,}; training.steps is {planned:,} now"


def _resumed(run: RecordedRun) -> str:
    """The resumes, also those whose steps were trained again later, which are not marked on the charts."""
    steps = run.resumes()
    again = [event.step for event in run.since_start("resumed") if event.is_superseded]
    parts = [f"after step {step:,}" for step in steps]
    parts += [f"after step {step:,} (trained again later)" for step in sorted({*again} - {*steps})]
    return listed(parts)


def _logged(run: RecordedRun) -> str:
    steps = [record["step"] for record in run.records]
    gap = float(np.median(np.diff(steps))) if len(steps) > 2 else 0
    every = "" if gap == 0 else ", every step" if gap == 1 else f", every {gap:g} steps"
    return f"{len(steps):,} times{every}"


def _end_of_loss(run: RecordedRun) -> str:
    loss = run.series("train/loss").finite().values
    if not len(loss):
        return ""
    num = max(1, len(loss) // 20)
    return f"{np.median(loss[-num:]):.4f}" + (f" (median of the last {num})" if num > 1 else "")


def _validation(run: RecordedRun) -> str:
    series = run.series("eval/loss").finite()
    if not len(series):
        return ""
    best = int(np.argmin(series.values))
    text = f"{series.values[-1]:.4f} at step {series.steps[-1]}"
    if best == len(series) - 1:
        return text
    return f"{text}; lowest {series.values[best]:.4f} at step {series.steps[best]}"


def _validation_by_source(run: RecordedRun) -> str:
    """The last loss of each validation source, the highest first."""
    keys = [key for key in run.keys if re.fullmatch(r"eval/.+/loss", key)]
    last = [(loss, key[len("eval/") : -len("/loss")]) for key in keys if (loss := run.last(key)) is not None]
    parts = [f"{name} {loss:.4f}" for loss, name in sorted(last, reverse=True)]
    return listed(parts)


def _tasks(run: RecordedRun) -> str:
    """The last accuracy in each task, with its standard error, and the last centered accuracy of groups."""
    names = [key[len("tasks/") : -len("/acc")] for key in run.keys if re.fullmatch(r"tasks/.+/acc", key)]
    parts = []
    for name in names:
        accuracy, error = (run.last(f"tasks/{name}/{key}") for key in ("acc", "acc_stderr"))
        if accuracy is not None:
            parts.append(f"{name} {accuracy:.1%}" + (f" \N{PLUS-MINUS SIGN} {error:.1%}" if error else ""))
    for key in run.keys:
        if (match := re.fullmatch(r"tasks/(.+)/centered", key)) and (centered := run.last(key)) is not None:
            parts.append(f"{match[1]} {centered:.4f} centered")
    return listed(parts)
