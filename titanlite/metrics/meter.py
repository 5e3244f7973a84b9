"""Meter: times the steps and turns what a log step knows into the metrics that sinks get.

Time spent outside training (validation, checkpoints, samples) is taken out of the step time and reported on
its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from titanlite.config.component import ConfigError
from titanlite.metrics.device import peak_memory
from titanlite.metrics.sinks import Console, JsonLines, Samples, Sink, TensorBoard


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """What is reported, and how often."""

    log_freq: int = 10
    """Steps between reports; the first and the last step always report."""
    enable_tensorboard: bool = True
    """Also write TensorBoard files to <dump_folder>/tb."""

    def __post_init__(self) -> None:
        if self.log_freq < 1:
            raise ConfigError(f"{self.log_freq} is below 1", "log_freq")

    def sinks(self, folder: Path, from_step: int, total_steps: int) -> list[Sink]:
        """The sinks of a run that continues after `from_step`; for rank 0."""
        sinks: list[Sink] = [
            Console(total_steps),
            JsonLines(folder / "metrics.jsonl", from_step),
            Samples(folder / "samples.txt", from_step),
        ]
        return [*sinks, TensorBoard(folder / "tb", from_step)] if self.enable_tensorboard else sinks


@dataclass
class Meter:
    """Of one rank. `tokens_per_step` over all ranks; `flops_per_token`, `peak_flops` by flops.py;
    `set_up_began`: when the run's set-up did, for the time to the first step."""

    device: torch.device
    sinks: Sequence[Sink]
    tokens_per_step: int
    flops_per_token: int
    world_size: int
    peak_flops: float | None
    synchronize: Callable[[], None]
    set_up_began: float | None = None
    _began: float = field(default_factory=time.perf_counter)
    _steps: int = 0
    _data_wait_s: float = 0.0
    _paused_s: float = 0.0
    _extra: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Counts the body's time as waiting for data."""
        began = time.perf_counter()
        yield
        self._data_wait_s += time.perf_counter() - began

    @contextmanager
    def apart(self, key: str) -> Iterator[None]:
        """Keeps the body's time out of the step time and reports it, in seconds, under `key`."""
        self.synchronize()  # what the device still has to do of the steps is theirs
        began = time.perf_counter()
        yield
        self.synchronize()
        seconds = time.perf_counter() - began
        self._paused_s += seconds
        self._extra[key] = self._extra.get(key, 0.0) + seconds

    def step_done(self) -> None:
        """One optimizer step has been issued."""
        self._steps += 1

    def report(self, step: int, values: dict[str, Any]) -> dict[str, Any]:
        """Add the measured metrics to `values`, send all to the sinks, start a new window. The caller has
        synchronised the device (by reading the loss)."""
        now = time.perf_counter()
        window_s, steps = now - self._began, max(self._steps, 1)
        training_s = max(window_s - self._paused_s, 1e-9)
        step_s = training_s / steps
        tokens_per_s = self.tokens_per_step / step_s
        flops = tokens_per_s / self.world_size * self.flops_per_token
        values = {
            **values,
            "train/perplexity": _exp(values["train/loss"]),
            "throughput/tokens_per_second": tokens_per_s,
            "throughput/tokens_per_second_per_device": tokens_per_s / self.world_size,
            "throughput/tflops": flops / 1e12,
            "time/step_s": step_s,
            "time/data_wait_pct": 100 * self._data_wait_s / training_s,
            **peak_memory(self.device),
            **self._extra,
        }
        if self.set_up_began is not None:
            values["time/to_first_step_s"], self.set_up_began = now - self.set_up_began, None
        if self.peak_flops is not None:
            values["throughput/mfu"] = flops / self.peak_flops
        self._began, self._steps, self._data_wait_s, self._paused_s, self._extra = now, 0, 0.0, 0.0, {}
        self.write(step, values)
        return values

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Send metrics to the sinks as they are."""
        for sink in self.sinks:
            sink.write(step, values)

    def sample(self, step: int, text: str) -> None:
        """Send a generated text to the sinks."""
        for sink in self.sinks:
            sink.sample(step, text)

    def close(self) -> None:
        """Flush and close the sinks."""
        for sink in self.sinks:
            sink.close()


def _exp(loss: float) -> float:
    return math.inf if loss >= 700 else math.exp(loss)
