"""The state of the GPUs: power, clock, temperature and utilisation by NVML, and retries of the allocator."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from titanlite.log import logger
from titanlite.metrics.metric import OpenMetric, StepResult
from titanlite.ranks import Ranks

READINGS: list[tuple[str, str, Callable[..., Any]]] = [  # the metric, its rank, and which GPU stands out
    ("gpu/power_w", "gpu/power_w_rank", max),
    ("gpu/sm_clock_mhz", "gpu/sm_clock_mhz_rank", min),
    ("gpu/temperature_c", "gpu/temperature_c_rank", max),
    ("gpu/utilization_pct", "gpu/utilization_pct_rank", min),
]


class Hardware(OpenMetric):
    """The state of all ranks' GPUs, in detailed reports; nothing on other devices.

    Metrics:
        memory/alloc_retries: how often torch freed its cache and tried again for want of memory, over all
            ranks since the previous detailed report; costs speed
        gpu/power_w, gpu/power_w_rank (W): highest power draw
        gpu/sm_clock_mhz, gpu/sm_clock_mhz_rank (MHz): lowest clock of the multiprocessors
        gpu/temperature_c, gpu/temperature_c_rank (C): highest temperature
        gpu/utilization_pct, gpu/utilization_pct_rank (%): lowest share of recent time in which a kernel ran
    """

    def __init__(self, ranks: Ranks):
        self._ranks, self._device = ranks, ranks.device
        self._retries = 0
        self._has_nvml = True

    def measure(self, step: StepResult) -> dict[str, float]:
        """The metrics. Of several GPUs, the one that stands out, and its rank. Collective."""
        if self._device.type != "cuda" or not step.is_detailed:
            return {}
        return extremes(self._ranks.gather_floats([self._new_retries(), *self._readings()]))

    def _new_retries(self) -> float:
        before, self._retries = self._retries, torch.cuda.memory_stats(self._device)["num_alloc_retries"]
        return float(self._retries - before)

    def _readings(self) -> list[float]:
        """Power in W, SM clock in MHz, temperature in degrees Celsius, utilisation in %; NaN: unknown."""
        if self._has_nvml:
            try:
                return [
                    torch.cuda.power_draw(self._device) / 1000,
                    float(torch.cuda.clock_rate(self._device)),
                    float(torch.cuda.temperature(self._device)),
                    float(torch.cuda.utilization(self._device)),
                ]
            except Exception as e:  # no package, no driver library, or a GPU without one of the sensors
                self._has_nvml = False
                reason = f"{type(e).__name__}: {e}"
                if isinstance(e, ImportError):
                    reason = "install nvidia-ml-py for them"
                logger.info(f"no metrics of the GPU's power, clock, temperature and utilisation: {reason}")
        return [math.nan] * 4


def extremes(rows: Sequence[Sequence[float]]) -> dict[str, float]:
    """The metrics from each rank's retries, power, clock, temperature and utilisation. The rank is named if
    there are several."""
    retries, *readings = zip(*rows)
    values: dict[str, float] = {"memory/alloc_retries": int(sum(retries))}
    for column, (key, rank_key, worst) in zip(readings, READINGS):
        known = [(value, rank) for rank, value in enumerate(column) if not math.isnan(value)]
        if known:
            value, rank = worst(known)
            values[key] = value
            if len(rows) > 1:
                values[rank_key] = rank
    return values
