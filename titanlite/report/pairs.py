"""The difference of two runs at equal numbers of tokens, and the verdicts on it and on their weights."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile

import numpy as np

from titanlite.report.estimates import Series, mean_with_error
from titanlite.report.verdicts import MIN_POINTS, SURE, Verdict, interval


def difference(first: Series, other: Series) -> Series:
    """Return the loss of `other` minus the loss of `first` at equal numbers of tokens, at the points of the
    run that was logged less often. Empty if the runs have no tokens in common."""
    first, other = first.finite(), other.finite()
    if len(first) < 2 or len(other) < 2:
        return first[:0]
    start, end = max(first.tokens[0], other.tokens[0]), min(first.tokens[-1], other.tokens[-1])
    first_inside = first[(first.tokens >= start) & (first.tokens <= end)]
    other_inside = other[(other.tokens >= start) & (other.tokens <= end)]
    grid = first_inside if len(first_inside) <= len(other_inside) else other_inside
    values = np.interp(grid.tokens, other.tokens, other.values)
    values = values - np.interp(grid.tokens, first.tokens, first.values)
    return Series(grid.steps, grid.tokens, values)


def pair_verdicts(names: tuple[str, str], delta: Series, are_paired: bool) -> list[Verdict]:
    """The verdict on two runs: `tie` if the mean difference over the last fifth of the common points is
    within two standard errors, `lower` if it is surely larger, none in between or with fewer than
    MIN_POINTS points. `are_paired`: both runs trained on the same sequences in each step, which makes the
    noise smaller."""
    if len(delta) < MIN_POINTS:
        return []
    num = len(delta) // 5
    estimate, start = mean_with_error(delta.values[-num:]), int(delta.steps[-num])
    same = "the same sequences in each step" if are_paired else "not the same sequences"
    evidence = (
        f"{names[1]} minus {names[0]}: {interval(estimate)} nats, the mean over the last {num} common points "
        f"at equal tokens; {same}"
    )
    if abs(estimate.value) <= 2 * estimate.error or estimate.value == 0:
        text = f"{names[0]} and {names[1]} end with the same loss, within {2 * estimate.error:.2g} nats"
        return [Verdict("tie", text, evidence, start, "note")]
    if abs(estimate.value) > SURE * estimate.error:
        lower = names[1] if estimate.value < 0 else names[0]
        text = f"{lower} ends with a loss that is lower by {abs(estimate.value):.3g} nats"
        return [Verdict("lower", text, evidence, start, "note")]
    return []


def weights_verdicts(first: Mapping[int, str], other: Mapping[int, str]) -> list[Verdict]:
    """The verdict on the digests of the weights of two runs, by step; none if no step has one of both."""
    steps = sorted(first.keys() & other.keys())
    equal = list(takewhile(lambda step: first[step] == other[step], steps))
    number = "the one step" if len(equal) == 1 else f"all {len(equal):,} steps"
    if len(equal) == len(steps):
        text = f"equal at {number} with digests in both, up to step {equal[-1]:,}" if equal else ""
        return [Verdict("weights", text, "", equal[-1], "good")] if equal else []
    step = steps[len(equal)]
    headline = f"the digests differ at step {step:,}, the first with digests in both that differ"
    if equal:
        headline += f"; equal at {number} before, up to step {equal[-1]:,}"
    return [Verdict("weights", headline, "", step, "note")]
