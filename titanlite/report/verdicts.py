"""Verdicts on one run: statements about its metrics that the noise of these metrics does not explain.

Each function takes series and returns the verdicts that hold, usually none. A verdict states an observation,
never its cause. docs/report.md has the rules. Fewer than MIN_POINTS logged losses give no verdict on the
loss, because noise cannot be told from a trend. Losses are not compared across the beginning of a stage with
other sources or another sequence length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from titanlite.report.estimates import (
    MAD_TO_SIGMA,
    MAX_ELEMENTS,
    MEDIAN_ERROR,
    Estimate,
    Floats,
    Series,
    noise,
    rolling_median,
    slope_with_error,
    spread,
    windows,
)
from titanlite.report.events import RunEvent
from titanlite.report.recorded_run import RecordedRun

MIN_POINTS = 200  # logged values; fewer give no verdict
SURE = 4.0  # standard errors of a trend; 3 would be enough for independent noise, correlated noise needs 4
SPIKE_WINDOW = 64  # points whose median is the level before a spike
MAX_SPIKES = 5  # verdicts on single spikes
FLAT = 0.02  # nats per doubling of tokens: a trend that is surely weaker is a plateau
FLAT_SHARE = 0.25  # and so is a trend that is surely weaker than this share of the run's earlier trend
MIN_VALIDATIONS = 10
MIN_GAPS, MAX_GAP = 5, 0.005  # differences to a loss in float32: their number, and their size in nats


@dataclass(frozen=True)
class Verdict:
    """A statement about a run. `name`: the verdict's name in docs/report.md. `headline`: the statement in one
    line. `evidence`: the numbers behind it, in one or several lines. `step`: where it begins; None: it holds
    for the whole run."""

    name: str
    headline: str
    evidence: str
    step: int | None
    weight: Literal["bad", "note", "good"]


def verdicts_of(run: RecordedRun) -> list[Verdict]:
    """Return all verdicts on one run, the bad ones first, then in the order of steps."""
    loss, max_norm = run.series("train/loss"), run.setting("training.max_norm")
    loss_changes, num_skipped = run.loss_changes(), run.series("train/skipped_steps").finite()
    newest = _parts(loss, loss_changes)[-1]
    if run.setting("training.clip") == "tensor":
        max_norm = 0.0  # not used after the first 100 steps
    verdicts = [
        *not_finite(loss, run.series("train/targets")),
        *diverged(newest),
        *rewound(run.rewinds()),
        *low_precision(run.series("numerics/loss_minus_fp32")),
        *spikes(
            loss,
            num_skipped,
            run.series("progress/sequences").finite(),
            run.skipped_sequences(),
            run.happened("spike"),
            loss_changes,
        ),
        *trend(newest, run.series("train/learning_rate")),
        *_with_epochs(run, overfitting(newest, run.series("eval/loss"))),
        *noisier(newest),
        *skipped(num_skipped, run.happened("skipped")),
        *clipping(run.series("train/grad_norm"), max_norm if isinstance(max_norm, (int, float)) else 0.0),
        *slower(run.series("throughput/tokens_per_second"), run.series("time/data_wait_pct"), run.resumes()),
    ]
    order = {"bad": 0, "note": 1, "good": 2}
    return sorted(verdicts, key=lambda verdict: (order[verdict.weight], verdict.step or 0))


def _parts(loss: Series, loss_changes: Sequence[int]) -> list[Series]:
    """The losses up to each of the steps `loss_changes`, and those after the last."""
    edges = np.searchsorted(loss.steps, loss_changes, side="right")
    return [loss[a:b] for a, b in pairwise([0, *edges, len(loss)])]


def nats(value: float) -> str:
    """Return a difference of losses with its sign and three significant digits."""
    return f"{value:+.3g}"


def interval(estimate: Estimate) -> str:
    """Return an estimate with two standard errors on each side, which is about a 95% interval."""
    return f"{estimate.value:.3g} +- {2 * estimate.error:.2g}"


def not_finite(loss: Series, num_targets: Series) -> list[Verdict]:
    """Losses that are NaN or infinite, except of steps without a target that counts."""
    without_targets = num_targets.steps[num_targets.values == 0]
    bad = loss[~np.isfinite(loss.values) & ~np.isin(loss.steps, without_targets)]
    if not len(bad):
        return []
    first, last, num = bad.steps[0], bad.steps[-1], len(bad)
    where = f"step {first:,}" if num == 1 else f"steps {first:,} to {last:,}"
    text = f"the loss of {num} logged step{'s' if num > 1 else ''} is not finite"
    return [Verdict("not finite", text, f"{num} of {len(loss):,} logged losses, {where}", int(first), "bad")]


def skipped(skipped_steps: Series, events: Sequence[RunEvent] = ()) -> list[Verdict]:
    """Steps whose update was skipped. `skipped_steps`: their number so far. `events`: those of skipped
    steps."""
    rises = np.flatnonzero(np.diff(skipped_steps.values, prepend=0.0) > 0)
    if not len(rises):
        return []
    num, first = int(skipped_steps.values[-1]), int(skipped_steps.steps[rises[0]])
    text = f"{num} step{'s' if num > 1 else ''} skipped"
    shown = ", ".join(f"{step:,}" for step in skipped_steps.steps[rises[:10]])
    evidence = f"the count rose before logged steps {shown}" + (", ..." if len(rises) > 10 else "")
    if events:
        evidence = _listed([event.text for event in events])
    return [Verdict("skipped steps", text, evidence, events[0].step if events else first, "note")]


def rewound(rewinds: Sequence[RunEvent]) -> list[Verdict]:
    """Rewinds of the run, also those to steps that were trained again later."""
    if not rewinds:
        return []
    times = f"{len(rewinds)} times" if len(rewinds) > 1 else "once"
    evidence = _listed([event.text for event in rewinds])
    return [Verdict("rewound", f"the run rewound {times}", evidence, rewinds[0].step, "note")]


def low_precision(loss_minus_fp32: Series) -> list[Verdict]:
    """The loss differs from one that is computed in float32 by more than the rounding of the logits explains:
    the median of the absolute differences of the last quarter, at least five, is above 0.005 nats."""
    gaps = loss_minus_fp32.finite()
    if len(gaps) < MIN_GAPS:
        return []
    last = gaps[-max(MIN_GAPS, len(gaps) // 4) :]
    size = float(np.median(np.abs(last.values)))
    if size <= MAX_GAP:
        return []
    evidence = (
        f"median of the absolute difference to float32 over the last {len(last)} measurements {size:.2g}, "
        f"mean difference {nats(float(np.mean(last.values)))}; rounding of bf16 logits explains about 0.001"
    )
    headline = f"the loss differs from one that is computed in float32, by {size:.2g} nats"
    return [Verdict("low precision", headline, evidence, int(last.steps[0]), "bad")]


def _listed(texts: Sequence[str], most: int = 5) -> str:
    """The first texts, one to a line, and how many more there are."""
    return "\n".join([*texts[:most], *([f"{len(texts) - most} more"] if len(texts) > most else [])])


def spikes(
    loss: Series,
    skipped_steps: Series | None = None,
    consumed: Series | None = None,
    skipped_sequences: Sequence[tuple[int, int]] = (),
    events: Sequence[RunEvent] = (),
    loss_changes: Sequence[int] = (),
) -> list[Verdict]:
    """Spikes in the logged losses, and those that only the guard has found, which judges every step.
    `skipped_steps`: the number of skipped steps so far. `consumed`: the number of sequences consumed so far.
    `skipped_sequences`: ranges of sequences that the run skips for good. `events`: the guard's spikes.
    `loss_changes`: steps after which losses cannot be compared with those before."""
    loss = loss.finite()
    parts = _parts(loss, loss_changes) if len(loss) >= MIN_POINTS else []
    logged = [
        verdict
        for part in parts
        for verdict in _logged_spikes(part, skipped_steps, consumed, skipped_sequences)
    ]
    gap = float(np.median(np.diff(loss.steps))) if len(loss) > 1 else 0.0
    begins = [verdict.step or 0 for verdict in logged]
    others = [_spike_of_event(event) for event in events if not _is_among(begins, event, gap)]
    verdicts = sorted([*logged, *others], key=lambda verdict: verdict.step or 0)
    if len(verdicts) > MAX_SPIKES:
        rest = f"; {len(verdicts) - MAX_SPIKES} more spikes of this run are not listed"
        last = verdicts[MAX_SPIKES - 1]
        return [*verdicts[: MAX_SPIKES - 1], replace(last, evidence=last.evidence + rest)]
    return verdicts


def _is_among(begins: Sequence[int], event: RunEvent, gap: float) -> bool:
    """Whether one of the spikes that begin at these logged steps is that of an event: whether they begin
    within the number of steps that made it certain and `gap` steps of each other."""
    reach = event.step - event.start_step + gap
    return any(abs(step - event.start_step) <= reach for step in begins)


def _spike_of_event(event: RunEvent) -> Verdict:
    height = event.about.get("height")
    by = f" by {height:.3g} nats" if isinstance(height, float) else ""
    headline = f"the loss spiked{by} at step {event.start_step:,}"
    evidence = f"found by the guard, which judges every step: {event.text}"
    return Verdict("spike", headline, evidence, event.start_step, "bad")


def _logged_spikes(
    loss: Series,
    skipped_steps: Series | None,
    consumed: Series | None,
    skipped_sequences: Sequence[tuple[int, int]],
) -> list[Verdict]:
    """Sudden rises of the loss: two of three consecutive logged losses lie more than six standard deviations
    of the noise above the median of the 64 before, or one loss lies more than twenty above it."""
    if len(loss) <= SPIKE_WINDOW:
        return []
    level, sigma = _level_before(loss.values)
    height = loss.values - level
    is_high = height > np.maximum(6 * sigma, 0.05)
    again = np.append(is_high[1:], False) | np.append(is_high[2:], [False, False])
    starts = np.flatnonzero((is_high & again) | (height > np.maximum(20 * sigma, 0.5)))
    verdicts, end = list[Verdict](), -1
    for start in map(int, starts):
        if start <= end:
            continue
        below = np.flatnonzero(loss.values[start:] <= level[start] + 2 * sigma[start])
        end = start + int(below[0]) if len(below) else len(loss)
        verdict = _spike(loss, start, end, level[start], sigma[start])
        end_step = int(loss.steps[min(end, len(loss) - 1)])
        top = start + int(np.argmax(loss.values[start:end]))
        data = _sequences(consumed, int(loss.steps[start - 1]), int(loss.steps[top]), skipped_sequences)
        skips = _skips(skipped_steps, int(loss.steps[start]), end_step)
        verdicts.append(replace(verdict, evidence=verdict.evidence + data + skips))
    return verdicts


def _sequences(
    consumed: Series | None, before: int, last: int, skipped_sequences: Sequence[tuple[int, int]]
) -> str:
    """The sequences of the steps after step `before` up to step `last`, as the end of a sentence."""
    if consumed is None or not np.isin([before, last], consumed.steps).all():
        return ""
    first, end = map(int, consumed.values[np.searchsorted(consumed.steps, [before, last])])
    steps = f"step {last:,}" if last == before + 1 else f"steps {before + 1:,} to {last:,}"
    ranges = list[str]()
    for skip_first, skip_last in [*skipped_sequences, (end, end)]:
        if first < min(skip_first, end):
            ranges.append(f"{first:,} to {min(skip_first, end) - 1:,}")
        first = max(first, skip_last + 1)
    return f"; {steps} trained on sequences {', '.join(ranges)}" if ranges else ""


def _skips(skipped_steps: Series | None, first: int, last: int) -> str:
    """How many steps were skipped from step `first` to step `last`, as the end of a sentence."""
    if skipped_steps is None or not len(skipped_steps):
        return ""
    counts = np.interp([first - 1, last], skipped_steps.steps, skipped_steps.values)
    return f"; {int(counts[1] - counts[0])} of these steps were skipped" if counts[1] > counts[0] else ""


def _level_before(values: Floats) -> tuple[Floats, Floats]:
    """For each value, the median of the SPIKE_WINDOW values before it and the deviation of the noise there;
    the level is infinite for the first values, which have fewer before them."""
    level, sigma = np.full(len(values), np.inf), np.ones(len(values))
    level[SPIKE_WINDOW:] = rolling_median(values, SPIKE_WINDOW)[:-1]
    rows, num, whole = windows(values, SPIKE_WINDOW)[:-1], MAX_ELEMENTS // SPIKE_WINDOW, noise(values)
    for i in range(0, len(rows), num):
        part, at = rows[i : i + num], slice(SPIKE_WINDOW + i, SPIKE_WINDOW + min(i + num, len(rows)))
        own = np.median(np.abs(np.diff(part, 2, axis=1)), axis=1) / np.sqrt(6)
        slow = np.median(np.abs(part - level[at, None]), axis=1)  # also sees changes over several points
        sigma[at] = np.maximum(MAD_TO_SIGMA * np.maximum(own, slow), whole)
    return level, sigma


def _spike(loss: Series, start: int, end: int, level: float, sigma: float) -> Verdict:
    top = start + int(np.argmax(loss.values[start:end]))
    height, step = loss.values[top] - level, int(loss.steps[start])
    headline = f"the loss spiked by {height:.3g} nats at step {step:,}"
    if end == len(loss):
        back = f"it did not return by step {loss.steps[-1]:,}"
    else:
        num = int(loss.steps[end]) - step
        back = f"it was back within 2 standard deviations after {num:,} step{'s' if num > 1 else ''}"
    evidence = (
        f"from {level:.4g} (median of the {SPIKE_WINDOW} logged losses before) to {loss.values[top]:.4g} "
        f"at step {loss.steps[top]:,}, {height / sigma:.0f} standard deviations of the noise ({sigma:.2g}); "
        f"{back}"
    )
    return Verdict("spike", headline, evidence, step, "bad")


def diverged(loss: Series) -> list[Verdict]:
    """The run ends with a loss far above the lowest that it had, both as medians over 5% of the run."""
    loss = loss.finite()
    if len(loss) < MIN_POINTS:
        return []
    size = max(10, len(loss) // 20)
    every = max(1, size // 16)
    medians = rolling_median(loss.values, size, every)
    starts = np.arange(len(loss) - size, -1, -every)[::-1]  # of the windows
    at = int(starts[np.argmin(medians)])
    lowest, last = medians.min(), medians[-1]
    sigma = max(noise(loss.values), spread(loss.values[at : at + size]))
    threshold = max(10 * MEDIAN_ERROR * sigma * np.sqrt(2 / size), 0.2)
    if last <= lowest + threshold:
        return []
    # The first window of the final part that stays above the threshold.
    inside = np.flatnonzero(medians <= lowest + threshold)
    step = int(loss.steps[starts[inside[-1]] + size])
    evidence = (
        f"median of the last {size} logged losses {last:.4g}, of those from step {loss.steps[at]:,} "
        f"{lowest:.4g}; a rise above {threshold:.2g} is no noise"
    )
    return [
        Verdict("diverged", f"the loss is {last - lowest:.3g} nats above its lowest", evidence, step, "bad")
    ]


def trend(loss: Series, learning_rate: Series) -> list[Verdict]:
    """Whether the loss still falls at the end of the run, or has reached a plateau. The trend is that against
    the logarithm of the number of tokens."""
    loss = loss.finite()
    if len(loss) < MIN_POINTS or loss.tokens[0] <= 0 or np.any(np.diff(loss.tokens) <= 0):
        return []
    if plateau := _plateau(loss, learning_rate):
        return [plateau]
    end = loss[-(len(loss) // 5) :]
    slope = slope_with_error(np.log2(end.tokens), end.values)
    if slope.value >= -SURE * slope.error:
        return []
    decays = is_decaying(learning_rate.after(int(end.steps[0])))
    beside = "; the learning rate fell meanwhile, which lowers the loss by itself" if decays else ""
    evidence = (
        f"from step {end.steps[0]:,} on, {len(end):,} logged losses against the logarithm of tokens: "
        f"{interval(slope)} nats per doubling{beside}"
    )
    headline = f"the loss is still falling, by {-slope.value:.2g} nats per doubling of tokens"
    return [Verdict("still falling", headline, evidence, int(end.steps[0]), "good")]


def _plateau(loss: Series, learning_rate: Series) -> Verdict | None:
    """The verdict on the longest part at the end of the run in which the loss surely does not fall."""
    for share in (0.8, 0.6, 0.4, 0.2):
        num = round(share * len(loss))
        end, before = loss[-num:], loss[:-num]
        slope = slope_with_error(np.log2(end.tokens), end.values)
        limit = FLAT
        if len(before) >= 16:
            earlier = slope_with_error(np.log2(before.tokens), before.values)
            limit = max(limit, FLAT_SHARE * -(earlier.value + 2 * earlier.error))
        is_flat = abs(slope.value) <= 2 * slope.error and abs(slope.value) + 2 * slope.error < limit
        rates = learning_rate.after(int(end.steps[0]))
        if is_flat and len(rates) and not is_decaying(rates):
            step = int(end.steps[0])
            evidence = (
                f"from step {step:,} on, {len(end):,} logged losses against the logarithm of tokens: "
                f"{interval(slope)} nats per doubling, and the learning rate did not fall"
            )
            return Verdict("plateau", f"the loss has not fallen since step {step:,}", evidence, step, "bad")
    return None


def is_decaying(learning_rate: Series) -> bool:
    """Whether the learning rate ends more than 10% below its highest value."""
    rates = learning_rate.finite().values
    return len(rates) > 0 and bool(rates[-1] < 0.9 * np.max(rates))


def overfitting(loss: Series, validation: Series) -> list[Verdict]:
    """The validation loss rises while the training loss falls by as much. Both are compared between the part
    of the run in which the validation loss was lowest and its end."""
    loss, validation = loss.finite(), validation.finite()
    if len(loss) < MIN_POINTS or len(validation) < MIN_VALIDATIONS:
        return []
    size = max(3, len(validation) // 8)
    means = np.mean(windows(validation.values, size), axis=1)
    at = int(np.argmin(means))
    if at + 2 * size > len(validation):
        return []  # the lowest part is the end, or overlaps it
    rise = float(means[-1] - means[at])
    # Root mean square, because a median of ten differences says too little.
    sigma = float(np.sqrt(np.mean(np.diff(validation.values, 2) ** 2) / 6))
    threshold = max(5 * sigma * np.sqrt(2 / size), 0.01)
    first, last = validation.steps[at], validation.steps[at + size - 1]
    then = loss.values[(loss.steps >= first) & (loss.steps <= last)]
    now = loss.values[loss.steps >= validation.steps[-size]]
    if rise <= threshold or min(len(then), len(now)) < 3:
        return []
    fall = float(np.median(then) - np.median(now))
    error = MEDIAN_ERROR * noise(loss.values) * np.sqrt(1 / len(then) + 1 / len(now))
    if fall < max(rise, 3 * error):
        return []
    evidence = (
        f"means of {size} validations: {means[at]:.4g} at steps {first:,} to {last:,}, {means[-1]:.4g} at "
        f"the end; meanwhile the training loss changed by {nats(-fall)}"
    )
    headline = f"the validation loss is {rise:.3g} nats above its lowest, the training loss fell"
    return [Verdict("overfitting", headline, evidence, int(last), "bad")]


def _with_epochs(run: RecordedRun, verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts, each with the epochs that the run had read at its step and at the end of the run."""
    end = run.records[-1]["step"] if run.records else 0
    given = []
    for verdict in verdicts:
        then, now = run.epochs(verdict.step or 0), run.epochs(end)
        text = f"; epochs by step {verdict.step:,}: {then}; by the end: {now}" if now else ""
        given.append(replace(verdict, evidence=verdict.evidence + text))
    return given


def noisier(loss: Series) -> list[Verdict]:
    """The noise of the last quarter of the run is more than 1.5 times that of the quarter before, with the
    same number of tokens per step."""
    loss = loss.finite()
    if len(loss) < MIN_POINTS:
        return []
    quarter = len(loss) // 4
    before, last = loss[-2 * quarter : -quarter], loss[-quarter:]
    sizes = [float(np.median(np.diff(part.tokens) / np.diff(part.steps))) for part in (before, last)]
    if abs(sizes[1] - sizes[0]) > 0.02 * sizes[0]:
        return []
    sigmas = noise(before.values), noise(last.values)
    # 5.6 / sqrt(points) is the 99.5% quantile of the logarithm for heavy-tailed noise (Student's t with 5).
    least = max(np.log(1.5), 6.5 / np.sqrt(quarter))
    if sigmas[0] <= 0 or np.log(max(sigmas[1], 1e-12) / sigmas[0]) <= least:
        return []
    step = int(last.steps[0])
    evidence = (
        f"standard deviation {sigmas[1]:.3g} since step {step:,}, {sigmas[0]:.3g} in the quarter before"
    )
    headline = f"the loss is {sigmas[1] / sigmas[0]:.1f} times as noisy as before"
    return [Verdict("noisier", headline, evidence, step, "note")]


def clipping(grad_norm: Series, max_norm: float) -> list[Verdict]:
    """More than half of the logged gradient norms are above training.max_norm, so that the steps' length is
    set by clipping."""
    norms = grad_norm.finite().values
    if len(norms) < MIN_POINTS or max_norm <= 0:
        return []
    share = float(np.mean(norms > max_norm))
    if share <= 0.5 + SURE * 0.5 / np.sqrt(len(norms)):
        return []
    evidence = (
        f"{share:.0%} of {len(norms):,} logged gradient norms are above training.max_norm = {max_norm:g}; "
        f"their median is {np.median(norms):.3g}"
    )
    return [Verdict("clipping always", "gradients are clipped in most steps", evidence, None, "note")]


def slower(throughput: Series, data_wait: Series, resumes: Sequence[int] = ()) -> list[Verdict]:
    """The median throughput of 50 logged steps stays more than 5% below the run's fast parts for 100 logged
    steps in a row. `resumes`: the steps after which the run was started again, perhaps on another machine."""
    throughput = throughput.finite()
    if len(throughput) < MIN_POINTS:
        return []
    medians = rolling_median(throughput.values, 50)
    best = float(np.percentile(medians, 90))
    error = MEDIAN_ERROR * noise(throughput.values) / np.sqrt(50) / max(best, 1e-9)
    is_slow = medians < (1 - max(0.05, SURE * error)) * best
    edges = np.diff(np.concatenate([[0], is_slow, [0]]).astype(int))
    stretches = [
        (a, b) for a, b in zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)) if b - a >= 100
    ]
    if not stretches:
        return []
    a, b = max(stretches, key=lambda pair: pair[1] - pair[0])
    first, last = int(throughput.steps[a]), int(throughput.steps[b + 48])
    slow = float(np.median(medians[a:b]))
    headline = f"training was {1 - slow / best:.0%} slower from step {first:,} to {last:,}"
    evidence = f"{slow:,.0f} tokens/s there, {best:,.0f} in the run's fast parts (medians of 50 logged steps)"
    waits = data_wait.finite()
    inside = (waits.steps >= first) & (waits.steps <= last)
    if inside.any() and not inside.all():
        there, elsewhere = np.median(waits.values[inside]), np.median(waits.values[~inside])
        evidence += f"; waiting for data {there:.1f}% of the time there, {elsewhere:.1f}% elsewhere"
    if starts := [step for step in resumes if first - 1 <= step <= last]:
        evidence += f"; resumed after step {', '.join(map(str, starts[:5]))}"
    return [Verdict("slower", headline, evidence, first, "note")]
