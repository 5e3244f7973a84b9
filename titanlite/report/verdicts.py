"""Verdicts on one run: statements about its metrics that the noise of these metrics does not explain.

Each function takes series or events and returns the verdicts that hold, usually none. A verdict states an
observation, never its cause. docs/report.md has the rules. Fewer than MIN_POINTS logged losses give no
verdict on the loss, because noise cannot be told from a trend. Losses are not compared across the beginning
of a stage with other sources or another sequence length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from titanlite.report.estimates import (
    MEDIAN_ERROR,
    Estimate,
    Series,
    noise,
    rolling_median,
    slope_with_error,
    spread,
    windows,
)
from titanlite.report.events import RunEvent
from titanlite.report.recorded_run import MAX_NAMED, RecordedRun, number

MIN_POINTS = 200  # logged values; fewer give no verdict
SURE = 4.0  # standard errors of a trend; 3 would be enough for independent noise, correlated noise needs 4
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
    loss, max_norm = run.series("train/loss"), run.setting("training.max_norm", int, float) or 0.0
    newest = loss.after(run.loss_changes()[-1]) if run.loss_changes() else loss
    if run.setting("training.clip") == "tensor":
        max_norm = 0.0  # not used after the first 100 steps
    verdicts = [
        *not_finite(loss, run.series("train/targets")),
        *diverged(newest),
        *rewound(run.since_start("rewound")),
        *low_precision(run.series("numerics/loss_minus_fp32")),
        *spikes(run.happened("spike")),
        *trend(newest, run.series("train/learning_rate")),
        *(_with_epochs(run, verdict) for verdict in overfitting(newest, run.series("eval/loss"))),
        *noisier(newest),
        *skipped(run.happened("skipped")),
        *clipping(run.series("train/grad_norm"), max_norm),
        *slower(run.series("throughput/tokens_per_second"), run.series("time/data_wait_pct"), run.resumes()),
    ]
    order = {"bad": 0, "note": 1, "good": 2}
    return sorted(verdicts, key=lambda verdict: (order[verdict.weight], verdict.step or 0))


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


def skipped(events: Sequence[RunEvent]) -> list[Verdict]:
    """Steps whose update was skipped."""
    if not events:
        return []
    text = f"{len(events)} step{'s' if len(events) > 1 else ''} skipped"
    return [Verdict("skipped steps", text, _in_lines(events), events[0].step, "note")]


def rewound(rewinds: Sequence[RunEvent]) -> list[Verdict]:
    """Rewinds of the run, also to steps that were trained again later."""
    if not rewinds:
        return []
    times = f"{len(rewinds)} times" if len(rewinds) > 1 else "once"
    return [Verdict("rewound", f"the run rewound {times}", _in_lines(rewinds), rewinds[0].step, "note")]


def _in_lines(events: Sequence[RunEvent]) -> str:
    """The first events, one to a line, and the number of the remaining ones."""
    more = [f"{len(events) - MAX_NAMED} more"] if len(events) > MAX_NAMED else []
    return "\n".join([*(event.text for event in events[:MAX_NAMED]), *more])


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


def spikes(events: Sequence[RunEvent]) -> list[Verdict]:
    """Spikes that the guard has found, which judges every step, logged or not."""
    verdicts = []
    for event in events[:MAX_SPIKES]:
        height = number(event.about.get("height"))
        by = "" if height is None else f" by {height:.3g} nats"
        headline = f"the loss spiked{by} at step {event.start_step:,}"
        verdicts.append(Verdict("spike", headline, event.text, event.start_step, "bad"))
    if (num := len(events) - MAX_SPIKES) > 0:
        rest = f"; {num} more spikes of this run are not listed"
        verdicts[-1] = replace(verdicts[-1], evidence=verdicts[-1].evidence + rest)
    return verdicts


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


def _with_epochs(run: RecordedRun, verdict: Verdict) -> Verdict:
    """The verdict with the epochs that the run had read at its step and at the end of the run."""
    then, now = run.epochs(verdict.step or 0), run.epochs(run.last_step)
    text = f"; epochs by step {verdict.step:,}: {then}; by the end: {now}" if now else ""
    return replace(verdict, evidence=verdict.evidence + text)


def noisier(loss: Series) -> list[Verdict]:
    """The noise of the last quarter of the run is more than 1.5 times the noise of the quarter before, with
    the same number of tokens per step."""
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
