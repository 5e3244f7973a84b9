"""The charts of the page: which metrics are shown, against what, and with which marks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import numpy as np

from titanlite.report.charts import Chart, Line, Mark, downsample
from titanlite.report.estimates import Floats, Series, noise, ratio_of_means, smooth
from titanlite.report.pairs import difference
from titanlite.report.recorded_run import SEQUENCES, RecordedRun
from titanlite.report.timeline import PAUSES, timeline

LOSS, VALIDATION = "train/loss", "eval/loss"
SPEED = "throughput/tokens_per_second"
# Metrics of the main charts: key, title, unit.
KNOWN = [
    (VALIDATION, "Validation loss", "nats per token"),
    ("eval/ema_loss", "Validation loss of the average of the weights", "nats per token"),
    ("eval/bits_per_byte", "Validation loss in bits per byte", "bits per byte"),
    ("train/learning_rate", "Learning rate", ""),
    ("train/grad_norm", "Gradient norm", ""),
    (SPEED, "Throughput", "tokens/s"),
    ("throughput/mfu", "Model FLOPs utilisation", ""),
    ("train/accuracy", "Top-1 accuracy", ""),
    ("moe/max_violation", "Most tokens of an expert, above the mean of its layer", "share"),
    ("memory/peak_reserved_gib", "Peak reserved memory", "GiB"),
    ("time/step_s", "Time per step", "s"),
    ("time/data_wait_pct", "Waiting for data", "%"),
]
# Metrics that say nothing new, or that the table of lost time has.
NOT_SHOWN = {
    "train/loss", "train/perplexity", "eval/perplexity", "eval/ema_perplexity", "eval/tokens",
    "eval/sequences",
    "progress/total_tokens", "progress/sequences", "progress/remaining_tokens", "throughput/tflops",
    "throughput/tokens_per_second_per_device",
    "train/noise_scale_sequences", "memory/peak_allocated_gib", "time/to_first_step_s",
    "compile/graphs", "compile/seconds", *PAUSES.values(),
}  # fmt: skip
MAX_OTHERS = 40  # charts of a group
MAX_MARKS = 300  # of a run: of stages, of saves, and of other events
MARKS = {
    "stage": "solid: a stage begins",
    "resumed": "dashed: resumed", "rewound": "dotted: rewound", "skipped": "cross: skipped step",
    "accepted": "plus: outlier accepted after too many in a row",
    "spike": "triangle: spike", "saved": "tick: saved",
}  # fmt: skip
MAX_SMOOTH_POINTS = 700  # draw at most this many points of a line without noise
NUM_AVERAGED = 20  # reports of the noise scale
MIN_NOISY_POINTS = 200  # a noisy metric with this many points also has a smoothed line


class ChartGroup(NamedTuple):
    """The charts of metrics whose names begin with the same word, and the names of those without a chart,
    because there are too many."""

    name: str
    charts: list[Chart]
    too_many: list[str]


def main_charts(runs: Sequence[RecordedRun]) -> list[Chart]:
    """Return the charts of the loss and of the metrics that most runs have."""
    by_time = _by_time(runs, LOSS, "Training loss by time")
    charts = [loss_by_tokens(runs), *_differences(runs), by_time, _by_compute(runs)]
    every_mark = [mark for i, run in enumerate(runs) for mark in marks_of(run, i)]
    stages = [mark for mark in every_mark if mark.kind == "stage"]
    for key, title, unit in KNOWN:
        marks = every_mark if key == SPEED else stages
        chart = metric_chart(runs, key, title, unit)
        charts.append(replace(chart, marks=marks, note=_explained(marks)))
        if key == VALIDATION:
            charts.append(_by_time(runs, VALIDATION, "Validation loss by time"))
    charts += [_noise_scales(runs), _expert_loads(runs)]
    return [chart for chart in charts if chart.lines]


def other_charts(runs: Sequence[RecordedRun]) -> list[ChartGroup]:
    """Return charts of all other metrics that change in some run, by the first word of their names."""
    shown = NOT_SHOWN | {key for key, _, _ in KNOWN}
    keys = sorted({key for run in runs for key in run.keys if not key.endswith("_rank")} - shown)
    # The perplexity of a validation source is exp of its loss.
    keys = [key for key in keys if not (key.startswith("eval/") and key.endswith("/perplexity"))]
    charts = {key: metric_chart(runs, key, key, "") for key in keys}
    changing = [key for key in keys if any(np.ptp(line.y) > 0 for line in charts[key].lines)]
    groups = []
    for name, members in groupby(changing, lambda key: key.partition("/")[0]):
        inside = list(members)
        groups.append(ChartGroup(name, [charts[key] for key in inside[:MAX_OTHERS]], inside[MAX_OTHERS:]))
    return groups


def loss_by_tokens(runs: Sequence[RecordedRun]) -> Chart:
    """Return the main chart."""
    lines, marks = list[Line](), list[Mark]()
    for i, run in enumerate(runs):
        loss = run.series(LOSS)
        lines += noisy_lines(i, loss, loss.tokens)
        marks += [mark for mark in marks_of(run, i) if mark.kind != "saved"]
    notes = ["thin: logged steps; thick: median over 3% of the run"] if _has_smooth(lines) else []
    notes += [_explained(marks)] if marks else []
    return Chart("Training loss", lines, "nats", "; ".join(notes), marks)


def noisy_lines(run: int, series: Series, x: Floats) -> list[Line]:
    """Return the line of the logged values, and above it the smoothed one if there are enough points.
    `x`: the place of each point of `series`."""
    is_finite = np.isfinite(series.values) & np.isfinite(x)
    series, x = series[is_finite], x[is_finite]
    if len(series) < 50:
        return [Line(run, *downsample(x, series.values))] if len(series) else []
    at, medians = smooth(series)
    return [Line(run, *downsample(x, series.values), "raw"), Line(run, x[at], medians, "smooth")]


def metric_chart(runs: Sequence[RecordedRun], key: str, title: str, unit: str) -> Chart:
    """Return the chart of one metric; it has no lines if no run has the metric."""
    lines = []
    for i, run in enumerate(runs):
        series = run.series(key).finite()
        if len(series) >= MIN_NOISY_POINTS and noise(series.values) > 0.01 * np.ptp(series.values):
            lines += noisy_lines(i, series, series.tokens)
        else:
            lines.append(Line(i, *downsample(series.tokens, series.values, MAX_SMOOTH_POINTS)))
    return Chart(title, [line for line in lines if len(line.x)], unit)


def marks_of(run: RecordedRun, index: int) -> list[Mark]:
    """Return the marks of one run: stages, saves, resumes, skipped steps, accepted outliers, spikes and
    rewinds."""
    saves = {event.step for event in run.happened("saved")} | {saved.step for saved in run.checkpoints}
    events = run.happened("resumed", "skipped", "accepted", "spike", "rewound")
    return [
        *_stage_marks(run, index),
        *(_mark(run, index, "saved", step, f"saved step {step}") for step in sorted(saves)[-MAX_MARKS:]),
        *(_mark(run, index, event.kind, event.step, event.text) for event in events[:MAX_MARKS]),
    ]


def _stage_marks(run: RecordedRun, index: int) -> list[Mark]:
    """The marks of the stages that have begun, except for the first."""
    consumed = run.series(SEQUENCES).finite()
    marks = []
    for stage in run.stages[1 : MAX_MARKS + 1] if len(consumed) else []:
        if stage.first_sequence < consumed.values[-1]:
            step = round(float(np.interp(stage.first_sequence, consumed.values, consumed.steps)))
            text = f"stage {stage.label} begins with sequence {stage.first_sequence:,}"
            marks.append(_mark(run, index, "stage", step, text))
    return marks


def _explained(marks: Sequence[Mark]) -> str:
    """The legend of the kinds of these marks."""
    kinds = {mark.kind for mark in marks}
    return "; ".join(text for kind, text in MARKS.items() if kind in kinds)


def _mark(run: RecordedRun, index: int, kind: str, step: int, text: str) -> Mark:
    every = run.series("train/loss") if len(run.series("train/loss")) else run.series("time/step_s")
    x = float(np.interp(step, every.steps, every.tokens)) if len(every) else float(step)
    return Mark(index, x, kind, f"{run.name}: {text}")  # type: ignore[arg-type]


def _differences(runs: Sequence[RecordedRun]) -> list[Chart]:
    """Return the chart of the differences between each run's loss and the loss of the first run."""
    first, lines, bands = runs[0].series(LOSS), list[Line](), [0.0]
    for i, run in enumerate(runs[1:], 1):
        delta = difference(first, run.series(LOSS))
        if len(delta) > 1:
            lines += noisy_lines(i, delta, delta.tokens)
            bands.append(2 * noise(delta.values))
    if not lines:
        return []
    note = "area: two standard deviations of the noise of one logged step" if max(bands) else ""
    title = f"Training loss minus that of {runs[0].name}"
    return [Chart(title, lines, "nats", note, band=max(bands))]


def _noise_scales(runs: Sequence[RecordedRun]) -> Chart:
    """Return the chart of the gradient noise scale."""
    scales = [(i, noise_scale(run)) for i, run in enumerate(runs)]
    lines = [
        Line(i, *downsample(scale.tokens, scale.values, MAX_SMOOTH_POINTS))
        for i, scale in scales
        if len(scale)
    ]
    note = f"means of noise and signal over up to {NUM_AVERAGED} reports, then divided"
    return Chart("Gradient noise scale", lines, "sequences", note)


def _expert_loads(runs: Sequence[RecordedRun]) -> Chart:
    """Return the chart of the newest loads of experts over the mean of their layer, in descending order."""
    lines, steps = list[Line](), list[str]()
    for i, run in enumerate(runs):
        if run.expert_loads is None:
            continue
        loads_LE = np.sort(run.expert_loads.tokens_LE, axis=1)[:, ::-1]
        loads_LE = loads_LE / loads_LE.mean(1, keepdims=True)
        x = np.arange(1.0, loads_LE.shape[1] + 1)
        lines += [Line(i, x, loads_LE.max(0), "raw"), Line(i, x, loads_LE.min(0), "raw")]
        lines.append(Line(i, x, loads_LE.mean(0), "smooth"))
        steps.append(f"{run.name}: step {run.expert_loads.step:,}")
    note = f"thick: mean of the layers; thin: highest and lowest of the layers; {', '.join(steps)}"
    return Chart(
        "Loads of experts", lines, "tokens over the mean", note, x_label="experts of a layer, by load"
    )


def noise_scale(run: RecordedRun) -> Series:
    """Return the gradient noise scale in sequences, from means over some reports."""
    noises, signals = run.series("train/noise_scale_noise"), run.series("train/noise_scale_signal")
    single = run.series("train/noise_scale_sequences")
    single = single[np.isin(single.steps, noises.steps)]
    if not len(single) or not np.array_equal(noises.steps, signals.steps):
        return single[:0]
    at = np.searchsorted(noises.steps, single.steps)
    # The single values are sequences per step x noise / signal.
    per_step = float(np.median(single.values * signals.values[at] / noises.values[at]))
    ratios = ratio_of_means(noises.values, signals.values, min(NUM_AVERAGED, max(len(noises) // 4, 1)))
    last = noises[-len(ratios) :]
    return Series(last.steps, last.tokens, per_step * ratios).finite()


def _by_time(runs: Sequence[RecordedRun], key: str, title: str) -> Chart:
    """Return the chart of a loss by the time that the runs had taken, as far as they have recorded it."""
    hours = [_hours_at(run, key) for run in runs]
    is_short = max((x[-1] for x in hours if x is not None and len(x)), default=0) < 2
    times = [None if x is None else x * (60 if is_short else 1) for x in hours]
    return _by_cost(runs, key, title, "minutes" if is_short else "hours", times)


def _by_compute(runs: Sequence[RecordedRun]) -> Chart:
    """Return the chart of the training loss by FLOPs, as far as the runs have recorded them."""
    flops = [_flops_at(run) for run in runs]
    return _by_cost(runs, LOSS, "Training loss by compute", "model FLOPs", flops)


def _by_cost(
    runs: Sequence[RecordedRun], key: str, title: str, label: str, places: Sequence[Floats | None]
) -> Chart:
    """The chart of a loss. `places`: for each run the place of each of its points on the x axis."""
    lines = list[Line]()
    for i, (run, x) in enumerate(zip(runs, places)):
        if x is not None:
            lines += noisy_lines(i, run.series(key), x)[-1:]  # the smoothed line only
    note = "median over 3% of the run" if _has_smooth(lines) else ""
    return Chart(title, lines, "nats", note, x_label=label)


def _hours_at(run: RecordedRun, key: str) -> Floats | None:
    """The hours that a run had taken at each point of a metric."""
    hours = timeline(run).hours
    if not len(hours):
        return None
    by_step = {record["step"]: at for record, at in zip(run.records, hours)}
    return np.array([by_step[step] for step in run.series(key).steps.tolist()])


def _flops_at(run: RecordedRun) -> Floats | None:
    """The model FLOPs of a run at each logged loss: tokens times FLOPs per token, by its throughput."""
    flops, tokens = run.series("throughput/tflops"), run.series("throughput/tokens_per_second_per_device")
    if len(flops) != len(tokens) or not len(flops):
        return None
    per_token = 1e12 * np.nanmedian(flops.values / np.maximum(tokens.values, 1e-9))
    return run.series(LOSS).tokens * per_token if np.isfinite(per_token) else None


def _has_smooth(lines: Sequence[Line]) -> bool:
    return any(line.style == "smooth" for line in lines)
