"""Profiling of chosen steps: torch.profiler traces with a table of the longest kernels, allocation histories,
or ranges for Nsight Systems.

Steps are counted from the run's beginning, so a resumed run traces the same ones.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerAction

from titanlite.config.component import ConfigError
from titanlite.log import logger

TOP = 20  # rows of the table
ALLOCATIONS = 200_000  # events of an allocation history


@dataclass(frozen=True, kw_only=True)
class Profiling:
    """Where the time and the memory of a step go."""

    enable_profiling: bool = False
    """Trace the last steps of each profile_freq."""
    profiler: Literal["torch", "nsys"] = "torch"
    """`torch`: traces in <dump_folder>/profile/, for ui.perfetto.dev, and at the end a table of the kernels
    that took longest. `nsys`: NVTX ranges and a capture range, for `nsys profile -c cudaProfilerApi`."""
    enable_memory_snapshot: bool = False
    """Record the allocations of the traced steps into <dump_folder>/profile/, for pytorch.org/memory_viz."""
    profile_freq: int = 10
    """Steps of a cycle, at whose end there is a trace."""
    profiler_warmup: int = 2
    """Steps before the traced ones in which the profiler already runs, so that its start is not traced."""
    profiler_active: int = 1
    """Steps of a trace."""
    profile_cycles: int = 1
    """Traces to take; 0: as many as there are cycles."""
    ranks: list[int] = field(default_factory=lambda: [0])
    """Ranks to trace."""

    def __post_init__(self) -> None:
        for key, least in (("profiler_warmup", 0), ("profiler_active", 1), ("profile_cycles", 0)):
            if getattr(self, key) < least:
                raise ConfigError(f"{getattr(self, key)} is below {least}", key)
        if self.profile_freq < self.profiler_warmup + self.profiler_active:
            raise ConfigError(
                f"{self.profile_freq} steps have no room for {self.profiler_warmup} of warm-up and "
                f"{self.profiler_active} traced ones",
                "profile_freq",
            )

    def action(self, step: int, first_step: int) -> ProfilerAction:
        """What the profiler does in `step` of a run that started at `first_step`."""
        cycle, place = divmod(step - 1, self.profile_freq)
        left = self.profile_freq - place  # steps of the cycle, this one included
        traced = left <= self.profiler_active
        whole = first_step <= step - place + self.profile_freq - self.profiler_active
        late = self.profile_cycles and cycle - (first_step - 1) // self.profile_freq >= self.profile_cycles
        if late or not whole or left > self.profiler_active + self.profiler_warmup:
            return ProfilerAction.NONE
        if not traced:
            return ProfilerAction.WARMUP
        return ProfilerAction.RECORD_AND_SAVE if left == 1 else ProfilerAction.RECORD


class Profiler:
    """Traces steps while it is open; `step_done` after each. A rank that is not asked for does nothing."""

    def __init__(self, config: Profiling, folder: Path, rank: int, first_step: int):
        self._config, self._folder, self._rank = config, folder, rank
        self._first_step = self._step = first_step
        self._table = ""
        self._torch: torch.profiler.profile | None = None
        self._ranges = contextlib.ExitStack()
        on = rank in config.ranks
        self._snapshots = on and config.enable_memory_snapshot
        self._nsys = on and config.enable_profiling and config.profiler == "nsys"
        if (self._snapshots or self._nsys) and not torch.cuda.is_available():
            key = "enable_memory_snapshot" if self._snapshots else "profiler"
            raise ConfigError("needs a CUDA device", f"profiling.{key}")
        if on and config.enable_profiling and not self._nsys:
            self._torch = torch.profiler.profile(
                schedule=lambda passed: config.action(first_step + passed, first_step),
                on_trace_ready=self._save_trace,
            )

    def __enter__(self) -> Profiler:
        if self._torch is not None:
            self._torch.start()
        self._switch()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ranges.close()
        if self._torch is not None and error is None:
            self._torch.stop()
        if self._table:
            logger.info(self._table)

    def step_done(self) -> None:
        """A step has been issued to the device."""
        if self._snapshots and self._action is ProfilerAction.RECORD_AND_SAVE:
            path = self._path("memory", "pickle")
            torch.cuda.memory._dump_snapshot(str(path))
            torch.cuda.memory._record_memory_history(enabled=None)
            logger.info(f"allocations of step {self._step} in {path}")
        if self._torch is not None:
            self._torch.step()
        self._step += 1
        self._switch()

    @property
    def _action(self) -> ProfilerAction:
        return self._config.action(self._step, self._first_step)

    def _switch(self) -> None:
        """Begin or end what torch.profiler does not do."""
        recording = self._action in (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
        earlier = self._step > self._first_step
        before = self._config.action(self._step - 1, self._first_step) if earlier else ProfilerAction.NONE
        begins = recording and before is not ProfilerAction.RECORD
        if self._snapshots and begins:
            torch.cuda.memory._record_memory_history(max_entries=ALLOCATIONS)
        if self._nsys:
            if before in (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE):
                torch.cuda.synchronize()  # or the kernels would come after the range
            self._ranges.close()
            if recording:
                self._ranges.enter_context(torch.cuda.profiler.profile())
                self._ranges.enter_context(torch.autograd.profiler.emit_nvtx())
                self._ranges.enter_context(torch.cuda.nvtx.range(f"step {self._step}"))

    def _path(self, what: str, ending: str) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder / f"{what}-step-{self._step}-rank-{self._rank}.{ending}"

    def _save_trace(self, done: torch.profiler.profile) -> None:
        path = self._path("trace", "json.gz")
        done.export_chrome_trace(str(path))
        steps = self._config.profiler_active
        self._table = f"where the time of step {self._step} went, on rank {self._rank}:\n"
        self._table += kernel_table(done.key_averages(), steps)
        logger.info(f"trace of step {self._step} in {path}")


def kernel_table(events: Any, steps: int) -> str:
    """The kernels, or without a device the operators, that took longest; times are a step's."""
    on_device = [e for e in events if e.device_type == DeviceType.CUDA]
    times = (
        {e.key: (e.self_device_time_total, e.count) for e in on_device}
        if on_device
        else {e.key: (e.self_cpu_time_total, e.count) for e in events if e.key != "ProfilerStep*"}
    )
    total = sum(time for time, _ in times.values()) or 1.0
    longest = sorted(times.items(), key=lambda item: -item[1][0])
    rows = [(name, time, count) for name, (time, count) in longest[:TOP]]
    if rest := longest[TOP:]:
        rows.append((f"{len(rest)} others", sum(t for _, (t, _) in rest), sum(c for _, (_, c) in rest)))
    lines = [f"{'ms':>9}  {'share':>6}  {'calls':>6}  name"]
    for name, time, count in rows:
        lines.append(f"{time / 1e3 / steps:9.2f}  {time / total:6.1%}  {count / steps:6.0f}  {name[:100]}")
    return "\n".join(lines)
