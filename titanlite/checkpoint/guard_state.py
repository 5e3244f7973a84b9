"""The check of the entry `guard` of train.json, which metrics/guard.py writes."""

from __future__ import annotations

import math
from typing import Any

from titanlite.config.json_file import expect

MAX_LOSSES, MAX_STEPS = 272, 16  # that the spike detector keeps


def check_guard(guard: Any) -> None:
    """Raise ValueError for a value that no run has written."""
    expect(guard, streak=int, streak_steps=list, skipped_steps=int, outliers=dict, spikes=dict)
    expect(guard, unreported_spikes=list, sequences=list, num_rewinds=int)
    outliers, spikes = guard["outliers"], guard["spikes"]
    expect(outliers, streak=int, losses=list, log_norms=list)
    expect(spikes, losses=list, steps=list, num_high=int, num_low=int, start_step=int)
    expect(spikes, level=float, is_reported=bool)
    for spike in guard["unreported_spikes"]:
        expect(spike, start_step=int, detected_step=int, level=float, height=float)
        if len(spike) > 4:
            raise ValueError("an entry of unreported_spikes has an unknown key")
    for values in (guard, outliers, spikes, *guard["unreported_spikes"]):
        _check_numbers(values.values())
    _check_list("streak_steps", guard["streak_steps"], int, 2 if guard["streak"] else 0)
    _check_list("outliers.losses", outliers["losses"], float)
    _check_list("outliers.log_norms", outliers["log_norms"], float, len(outliers["losses"]))
    _check_list("spikes.losses", spikes["losses"], float)
    _check_list("spikes.steps", spikes["steps"], int, min(len(spikes["losses"]), MAX_STEPS))
    if len(spikes["losses"]) > MAX_LOSSES:
        raise ValueError(f"spikes.losses has {len(spikes['losses'])} numbers, more than {MAX_LOSSES}")
    for numbers in guard["sequences"]:
        _check_list("an entry of sequences", numbers, int, 3)
    if not guard["sequences"]:
        raise ValueError("sequences is empty")
    steps = [step for step, _, _ in guard["sequences"]]
    if steps != sorted(set(steps)):
        raise ValueError(f"the steps {steps} of sequences do not ascend")


def _check_list(name: str, values: Any, kind: type, length: int | None = None) -> None:
    """Raise ValueError unless `values` is a list of finite numbers of that type, and of that length."""
    if type(values) is not list or any(type(value) is not kind for value in values):
        raise ValueError(f"{name} is not a list of numbers of type {kind.__name__}")
    if length is not None and len(values) != length:
        raise ValueError(f"{name} has {len(values)} numbers, not {length}")
    _check_numbers(values)


def _check_numbers(values: Any) -> None:
    """Raise ValueError for a number that is not finite, and for an integer that is negative or too large."""
    for value in values:
        if type(value) is int and not 0 <= value < 1 << 63:
            raise ValueError(f"{value} is out of range")
        if type(value) is float and not math.isfinite(value):
            raise ValueError(f"{value} is not finite")
