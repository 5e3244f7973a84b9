"""How often to save, for a rate of failures, and the time that saves and failures cost."""

from __future__ import annotations

import math
from typing import NamedTuple

from titanlite.lab.cards import GIB

# Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 GPUs (arXiv 2407.21783, section 3.3.4).
GPU_HOURS_PER_FAILURE = 54 * 24 * 16384 / 419
STALL_S_PER_GIB = 0.42 / 16.7  # an asynchronous save of 16.7 GiB by one GPU: checkpoint_h200_save_async.json


class Saves(NamedTuple):
    """`lost_share`: of the time, for stalls by saves and for steps that are repeated after failures."""

    best_interval_steps: int
    lost_share: float


def best_saves(num_bytes: float, gpus: int, step_s: float, mtbf_hours: float) -> Saves:
    """The best interval between saves of so many bytes by all GPUs. Young (1974): a save every
    sqrt(2 x stall x mean time between failures) costs least. A failure repeats half an interval."""
    stall_s, mean_s = STALL_S_PER_GIB * num_bytes / GIB / gpus, mtbf_hours * 3600
    steps = max(round(math.sqrt(2 * stall_s * mean_s) / step_s), 1)
    interval_s = steps * step_s
    return Saves(steps, stall_s / interval_s + interval_s / (2 * mean_s))


def span(hours: float) -> str:
    """A time in seconds, minutes, hours, days or years."""
    for size, unit in ((365.25 * 24, "years"), (24, "days"), (1, "hours"), (1 / 60, "minutes")):
        if hours >= 2 * size:
            return f"{hours / size:.3g} {unit}"
    return f"{3600 * hours:.3g} seconds"
