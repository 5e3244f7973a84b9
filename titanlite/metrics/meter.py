"""Meter: times the steps, and turns a step's values into the metrics that sinks get.

Time spent outside training (validation, checkpoints, samples) is taken out of the step time and reported on
its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from titanlite.config.amount import Interval
from titanlite.config.component import ConfigError, check_at_least
from titanlite.data.step_sizes import StepSize
from titanlite.log import logger
from titanlite.metrics.memory import peak_memory
from titanlite.metrics.metric import Metric
from titanlite.metrics.records import utc_now
from titanlite.metrics.sinks.base import RunInfo, Sink, Sinks
from titanlite.metrics.sinks.console import Console
from titanlite.metrics.sinks.events import EventLog
from titanlite.metrics.sinks.jsonl import JsonLines, Tables
from titanlite.metrics.sinks.samples import Samples
from titanlite.metrics.sinks.tensorboard import TensorBoard
from titanlite.parallelism import Degrees
from titanlite.step_clock import StepClock


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Which metrics are reported, and where. Console, metrics.jsonl, events.jsonl and samples.txt always get
    them; `[[metrics.sinks]]` adds sinks, each at most once, `[[metrics.extra]]` metrics from outside the
    package."""

    log_freq: Interval = 10
    """Steps between reports. The first and the last step always report."""
    detail_freq: Interval = 100
    """Steps between detailed reports: norms of every parameter, token losses, step times, hardware. 0: none;
    otherwise also at the run's first and last step."""
    probe_freq: Interval = 0
    """Steps between probes of each block's residual stream, attention and dead MLP units. 0: none; otherwise
    also at the run's first and last step."""
    digest_freq: Interval = 0
    """Steps between digests of the weights, with which `titanlite compare` finds the first step at which runs
    differ. Training waits while each rank hashes its shards. Not with tensor parallel. 0: none."""
    extra: list[Metric] = field(default_factory=list)
    """Metrics from outside the package, one `[[metrics.extra]]` table each, measured in every report."""
    sinks: list[Sink] = field(default_factory=lambda: [TensorBoard()])
    """Sinks beside the console, metrics.jsonl, events.jsonl and samples.txt: one `[[metrics.sinks]]` table
    each, which replace the default, TensorBoard; `sinks = []`: none."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "log_freq")
        check_at_least(self, 0, "detail_freq", "probe_freq", "digest_freq")
        names = [sink.name for sink in self.sinks]
        for i, name in enumerate(names):
            if name in names[:i]:
                raise ConfigError(f"{name!r} is named twice", f"sinks.{i}.name")

    def check(self, degrees: Degrees) -> None:
        """Raises ConfigError for digests of weights whose rows a layout cuts: a digest is made of rows."""
        if self.digest_freq and degrees.tp > 1:
            raise ConfigError(
                f"not with parallelism.tensor_parallel_degree = {degrees.tp}, which cuts rows of weights",
                "metrics.digest_freq",
            )

    def is_due(self, step: int, last_step: int) -> bool:
        """Whether `step` has a report, whatever happens in it."""
        is_extended = self.detail_is_due(step, last_step) or self.probe_is_due(step, last_step)
        return step == last_step or step % self.log_freq == 0 or is_extended or self.digest_is_due(step)

    def detail_is_due(self, step: int, last_step: int) -> bool:
        """Whether `step` has a detailed report."""
        return _is_due(self.detail_freq, step, last_step)

    def probe_is_due(self, step: int, last_step: int) -> bool:
        """Whether `step` has a probe."""
        return _is_due(self.probe_freq, step, last_step)

    def digest_is_due(self, step: int) -> bool:
        """Whether `step` has a digest of the weights."""
        return self.digest_freq > 0 and step % self.digest_freq == 0

    def open_sinks(self, run: RunInfo) -> Sinks:
        """All sinks of a run; for rank 0. Raises ConfigError for one that cannot work as it is set."""
        records = JsonLines(run.folder / "metrics.jsonl", run.resumed_step)
        if records.superseded is not None:
            logger.info(f"the logged steps {run.resumed_step + 1} to {records.superseded} are trained again")
        sinks = Sinks(
            {
                "console": Console(run.total_steps),
                "metrics.jsonl": records,
                "tables": Tables(run.folder, run.resumed_step),
                "events.jsonl": EventLog(run.folder / "events.jsonl", run.resumed_step),
                "samples.txt": Samples(run.folder / "samples.txt", run.resumed_step),
            }
        )
        for sink in self.sinks:
            sinks.add(sink, run)
        return sinks


def _is_due(freq: int, step: int, last_step: int) -> bool:
    return freq > 0 and (step in (1, last_step) or step % freq == 0)


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """The cost of a step, for throughput and MFU."""

    seq_len: int
    """Tokens that are predicted in each sequence, as training.seq_len."""
    world_size: int
    flops_per_token: Mapping[int, int]
    """Model FLOPs of forward and backward, by flops.py, for each length of sequences that is trained on."""
    peak_flops: float | None
    """Peak FLOP/s of one device; None: unknown, there is no MFU."""


@dataclass
class Meter:
    """Times the steps of one rank. `synchronize` waits for the device. `clock` measures the phases of a step,
    on CUDA of the steps for which `is_measured` is true. `max_over_ranks`: the elementwise maximum of a
    tensor. `set_up_began`: when the set-up of the run began, for the time to the first step.

    Metrics:
        throughput/tokens_per_second (tokens/s): positions computed, padding included, over all ranks
        throughput/tokens_per_second_per_device (tokens/s per GPU): the same per rank
        throughput/tflops (TFLOP/s per GPU): model FLOPs: 6 per parameter and token, and attention, without
            recomputation. All parameters count but an embedding that is only looked up. With `[lora]`, a
            frozen parameter has 4; that includes the gradient of the first block's input, which is not
            computed
        throughput/mfu (share): model FLOPs relative to the device's dense bf16 peak; absent for an unknown
            device and in float32
        time/step_s (s): mean time of a step
        time/data_wait_pct (%): time in which rank 0 waited for its next batch
        time/to_first_step_s (s): from the start of the set-up to the end of the first step; once
        time/utc: when the report was made, such as 2026-11-28T07:00:00.123+00:00
        memory/peak_allocated_gib (GiB): peak of tensors on rank 0's GPU
        memory/peak_reserved_gib (GiB): peak that torch reserved on it: this has to fit
        memory/max_allocated_gib, memory/max_reserved_gib (GiB): with several GPUs: the same of the GPU that
            has most
    """

    device: torch.device
    sinks: Sinks
    cost: StepCost
    synchronize: Callable[[], None]
    clock: StepClock
    is_measured: Callable[[int], bool]
    max_over_ranks: Callable[[torch.Tensor], torch.Tensor]
    set_up_began: float | None = None
    _began: float = field(default_factory=time.perf_counter)
    _steps: int = 0
    _tokens: int = 0
    _flops: int = 0
    _data_wait_s: float = 0.0
    _paused_s: float = 0.0
    _extra: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def waiting_for_data(self, step: int) -> Iterator[None]:
        """Begins `step` with the body, whose time counts as waiting for data."""
        self.clock.begin(step, self.is_measured(step))
        began = time.perf_counter()
        yield
        self._data_wait_s += time.perf_counter() - began
        self.clock.enter("start")

    @contextmanager
    def untimed(self, key: str) -> Iterator[None]:
        """Keeps the body's time out of the step time and reports it, in seconds, under `key`.

        Metrics:
            time/validation_s (s): validation on sequences
            time/tasks_s (s): scoring of tasks
            time/generation_s (s): samples
            time/probe_s (s): [probes](#the-probe)
            time/digest_s (s): digests of the weights (`metrics.digest_freq`)
            time/fault_check_s (s): checks for silent faults (`guard.fault_check_freq`)
            time/rewind_s (s): a rewind after a spike ([numerics.md](numerics.md#rewinds))
            time/profiling_s (s): writing of profiles
            checkpoint/stall_s (s): pause of training for a save
            checkpoint/copy_s (s): pause of training for copies to the memory of the nodes
        """
        self.synchronize()  # work of the steps that is still queued on the device counts as theirs
        began = time.perf_counter()
        yield
        self.synchronize()
        seconds = time.perf_counter() - began
        self._paused_s += seconds
        self._extra[key] = self._extra.get(key, 0.0) + seconds

    def step_done(self, size: StepSize) -> None:
        """One optimizer step has been issued."""
        self.clock.end()
        tokens = size.global_batch_size * self.cost.seq_len
        self._steps += 1
        self._tokens += tokens
        self._flops += tokens * self.cost.flops_per_token[self.cost.seq_len // size.num_splits]

    def report(self, step: int, values: dict[str, Any]) -> dict[str, Any]:
        """Add the measured metrics to `values`, send them to the sinks and start a new window of steps. The
        caller has synchronised the device by reading the loss. Collective."""
        now = time.perf_counter()
        window_s, steps = now - self._began, max(self._steps, 1)
        training_s = max(window_s - self._paused_s, 1e-9)
        tokens_per_s = self._tokens / training_s
        flops = self._flops / training_s / self.cost.world_size
        values = {
            **values,
            "throughput/tokens_per_second": tokens_per_s,
            "throughput/tokens_per_second_per_device": tokens_per_s / self.cost.world_size,
            "throughput/tflops": flops / 1e12,
            "time/step_s": training_s / steps,
            "time/data_wait_pct": 100 * self._data_wait_s / training_s,
            "time/utc": utc_now(),
            **self._memory(),
            **self._extra,
        }
        if self.set_up_began is not None:
            values["time/to_first_step_s"], self.set_up_began = now - self.set_up_began, None
        if self.cost.peak_flops is not None:
            values["throughput/mfu"] = flops / self.cost.peak_flops
        self._began, self._steps, self._tokens, self._flops = now, 0, 0, 0
        self._data_wait_s, self._paused_s, self._extra = 0.0, 0.0, {}
        self.clock.clear()
        self.sinks.write(step, values)
        return values

    def _memory(self) -> dict[str, float]:
        """Peak memory of this rank and, with several ranks, the highest of all. Collective."""
        values = peak_memory(self.device)
        if values and self.cost.world_size > 1:
            most = self.max_over_ranks(torch.tensor(list(values.values()), device=self.device)).tolist()
            values |= zip(("memory/max_allocated_gib", "memory/max_reserved_gib"), most)
        return values
