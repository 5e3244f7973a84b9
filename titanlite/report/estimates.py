"""Series of a metric, and robust estimates of their noise and trend.

All estimates are deterministic: none draws random numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from titanlite.metrics.spikes import MAD_TO_SIGMA

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MEDIAN_ERROR = 1.2533  # standard error of a median per standard error of a mean, sqrt(pi / 2)
MAX_SMOOTH = 700  # points of a smoothed line
MAX_ELEMENTS = 1 << 22  # of windows that are copied at a time
MAX_BLOCK = 64  # longest correlation, in points, that the error of a trend allows for


@dataclass(frozen=True)
class Series:
    """One metric of one run: its values by step, with the tokens that the run had trained on. Values may be
    NaN or infinite."""

    steps: Ints
    tokens: Floats
    values: Floats

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, index: Any) -> Series:
        """Return the points of a slice, of an index array or of a mask."""
        return Series(self.steps[index], self.tokens[index], self.values[index])

    def finite(self) -> Series:
        """Return the points whose value is finite."""
        return self[np.isfinite(self.values)]

    def after(self, step: int) -> Series:
        """Return the points of later steps than `step`."""
        return self[self.steps > step]


class Estimate(NamedTuple):
    """A value and its standard error."""

    value: float
    error: float


def noise(values: Floats) -> float:
    """Return the standard deviation of the noise of a series, from its second differences, which a trend does
    not change. 0 for fewer than three values."""
    if len(values) < 3:
        return 0.0
    return float(MAD_TO_SIGMA * np.median(np.abs(np.diff(values, 2))) / np.sqrt(6))


def spread(values: Floats) -> float:
    """Return the robust standard deviation of values around their median, slow changes included."""
    return float(MAD_TO_SIGMA * np.median(np.abs(values - np.median(values)))) if len(values) else 0.0


def windows(values: Floats, size: int) -> Floats:
    """Return all windows of `size` consecutive values, as the rows of a view. No rows if there are fewer
    values."""
    if len(values) < size:
        return np.empty((0, size))
    return np.lib.stride_tricks.sliding_window_view(values, size)


def rolling_median(values: Floats, size: int, every: int = 1) -> Floats:
    """Return the median of each window of `size` consecutive values; with `every` only of each so many
    windows, counted back from the last."""
    rows = windows(values, size)[::-1][::every][::-1]
    num = max(1, MAX_ELEMENTS // size)  # rows at a time, because the median makes a copy
    medians = [np.median(rows[i : i + num], axis=1) for i in range(0, len(rows), num)]
    return np.concatenate(medians) if medians else np.empty(0)


def smooth(series: Series) -> tuple[Ints, Floats]:
    """Return medians over 3% of a series, at least 15 points, around at most MAX_SMOOTH of its points, and
    the indices of these points. Up to half of a window is missing at both ends."""
    num = len(series)
    half = max(15, num // 33) // 2
    at = (
        np.unique(np.linspace(0, num - 1, min(num, MAX_SMOOTH)).astype(np.int64)) if num else np.empty(0, int)
    )
    return at, np.array([np.median(series.values[max(0, i - half) : i + half + 1]) for i in at])


def ratio_of_means(above: Floats, below: Floats, size: int) -> Floats:
    """Return the mean of `above` divided by the mean of `below` over each window of `size` values. NaN where
    a mean is not above 0. The mean of the ratios themselves would be biased."""
    means = np.mean(windows(above, size), axis=1), np.mean(windows(below, size), axis=1)
    is_valid = (means[0] > 0) & (means[1] > 0)
    return np.where(is_valid, means[0] / np.where(is_valid, means[1], 1.0), np.nan)


def mean_with_error(values: Floats) -> Estimate:
    """Return the mean of correlated values, with its standard error."""
    mean = float(np.mean(values))
    return Estimate(mean, _error(values - mean, float(len(values)), num_fitted=1))


def slope_with_error(x: Floats, y: Floats) -> Estimate:
    """Return the slope of the least-squares line through points in order, with a standard error that allows
    for correlated noise. The slope is 0 and its error infinite if all x are equal."""
    x = x - np.mean(x)
    square = float(np.sum(x * x))
    if len(x) < 8 or square == 0:
        return Estimate(0.0, np.inf)
    slope = float(np.sum(x * y)) / square
    residuals = y - np.mean(y) - slope * x
    return Estimate(slope, _error(x * residuals, square, num_fitted=2))


def _error(terms: Floats, divisor: float, num_fitted: int) -> float:
    """Return the standard error of sum(terms) / divisor by Newey & West (1987), the limit of a moving-block
    bootstrap (Kuensch 1989) for many draws. Never below the error of uncorrelated terms."""
    num = len(terms)
    block = max(1, min(MAX_BLOCK, num // 8))
    own = float(np.sum(terms * terms))
    total = own
    for lag in range(1, block):
        total += 2 * (1 - lag / block) * float(np.sum(terms[lag:] * terms[:-lag]))
    return float(np.sqrt(max(total, own) * num / max(num - num_fitted, 1))) / divisor
