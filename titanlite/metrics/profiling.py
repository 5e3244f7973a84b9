"""Profiling of chosen steps: torch.profiler traces with a table of the longest kernels, allocation histories,
or ranges for Nsight Systems.

Steps are counted from the beginning of the run, so a resumed run traces the same steps.
torch.profiler.schedule counts from the start of the process, and would save traces that a resume has cut.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from types import TracebackType
from typing import Any, Literal

import torch
from torch.profiler import ProfilerAction

from titanlite.config.component import ConfigError, check_at_least
from titanlite.log import logger
from titanlite.storage import upload
from titanlite.torch_compat import dump_memory_history, record_memory_history

TABLE_ROWS = 20
MAX_ALLOCATIONS = 200_000  # events of an allocation history


@dataclass(frozen=True, kw_only=True)
class Profiling:
    """Profiles of chosen steps: time by kernel, memory by allocation."""

    enable_profiling: bool = False
    """Trace profiler_active steps once, up to the first step that is a multiple of profile_freq."""
    profiler: Literal["torch", "nsys"] = "torch"
    """`torch`: traces for ui.perfetto.dev in <dump_folder>/profile/, and a final table of the longest kernels
    in the log. `nsys`: NVTX and capture ranges, for `nsys profile -c cudaProfilerApi
    --capture-range-end=repeat`."""
    enable_memory_snapshot: bool = False
    """Write the traced steps' allocations to <dump_folder>/profile/, for pytorch.org/memory_viz."""
    profile_freq: int = 10
    """The last traced step is a multiple of this."""
    profiler_warmup: int = 2
    """Steps before the trace in which the profiler already runs."""
    profiler_active: int = 1
    """Number of traced steps."""
    ranks: list[int] = field(default_factory=lambda: [0])
    """Ranks to trace."""

    def __post_init__(self) -> None:
        check_at_least(self, 0, "profiler_warmup")
        check_at_least(self, 1, "profiler_active")
        if self.profile_freq < self.profiler_warmup + self.profiler_active:
            raise ConfigError(
                f"{self.profile_freq} steps have no room for {self.profiler_warmup} steps of warm-up and "
                f"{self.profiler_active} traced steps",
                "profile_freq",
            )

    def check(self, device: torch.device, world_size: int) -> None:
        """Raises ConfigError for a profile that needs a CUDA device, and for ranks that do not exist."""
        if device.type != "cuda":
            for on, key in (
                (self.enable_memory_snapshot, "enable_memory_snapshot"),
                (self.enable_profiling and self.profiler == "nsys", "profiler"),
            ):
                if on:
                    raise ConfigError("needs a CUDA device", f"profiling.{key}")
        if not self.ranks:
            raise ConfigError("names no rank; to profile no rank, leave the section out", "profiling.ranks")
        if missing := [rank for rank in self.ranks if not 0 <= rank < world_size]:
            raise ConfigError(f"there is no rank {missing[0]} among {world_size}", "profiling.ranks")

    def last_traced(self, first_step: int, last_step: int) -> int:
        """The last traced step of a run from `first_step` to `last_step`: the first multiple of profile_freq
        for which all traced steps are in the run; 0 if there is none."""
        end = -(-(first_step + self.profiler_active - 1) // self.profile_freq) * self.profile_freq
        return end if end <= last_step else 0


class Profiler:
    """Traces steps while it is open; call `step_done` after each step. Does nothing on ranks that are not
    traced. Steps are counted as they are taken: after a rewind, the number in the name of a trace is higher
    than the number of the step.

    `untimed`: a context in which traces are written, to keep that time out of the step time.
    """

    def __init__(
        self,
        config: Profiling,
        folder: PurePath,
        rank: int,
        first_step: int,
        last_step: int,
        untimed: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        self._config, self._rank, self._untimed = config, rank, untimed
        self._step, self._table, self._ranges = first_step, "", contextlib.ExitStack()
        on = rank in config.ranks and (config.enable_profiling or config.enable_memory_snapshot)
        self._folder = folder
        self._last = config.last_traced(first_step, last_step) if on else 0
        self._first = self._last - config.profiler_active + 1 if self._last else 0
        self._torch: torch.profiler.profile | None = None
        if self._last and config.enable_profiling and config.profiler == "torch":
            self._torch = torch.profiler.profile(
                schedule=lambda passed: self._action(first_step + passed), on_trace_ready=self._save_trace
            )
        if on:
            none = f"no multiple of profile_freq = {config.profile_freq} fits into this run"
            logger.info(f"profiling up to step {self._last}" if self._last else f"profiling: {none}")

    def __enter__(self) -> Profiler:
        if self._torch is not None:
            self._torch.start()
        self._begin()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ranges.close()
        if self._last and self._config.enable_memory_snapshot:
            record_memory_history(None)
        if self._torch is not None and error is None:
            self._step = 0  # an incomplete trace is not saved
            self._torch.stop()
        if self._table:
            logger.info(self._table)

    def step_done(self) -> None:
        """A step has been issued to the device."""
        with self._untimed() if self._step == self._last else nullcontext():
            self._advance()

    def _advance(self) -> None:
        is_end = self._step == self._last
        if (is_end or self._step + 1 == self._first) and torch.cuda.is_available():
            torch.cuda.synchronize()  # otherwise the next trace would begin with kernels of this step
        if is_end:
            self._ranges.close()
            if self._config.enable_memory_snapshot:
                self._save("memory", "pickle", dump_memory_history)
                record_memory_history(None)
        if self._torch is not None:
            self._torch.step()
        self._step += 1
        self._begin()

    def _action(self, step: int) -> ProfilerAction:
        if self._first <= step <= self._last:
            return ProfilerAction.RECORD_AND_SAVE if step == self._last else ProfilerAction.RECORD
        if self._first - self._config.profiler_warmup <= step < self._first:
            return ProfilerAction.WARMUP
        return ProfilerAction.NONE

    def _begin(self) -> None:
        """At the first step of the trace, begin allocation histories and ranges for nsys."""
        if self._step != self._first:
            return
        if self._config.enable_memory_snapshot:
            record_memory_history(MAX_ALLOCATIONS)
        if self._config.enable_profiling and self._config.profiler == "nsys":
            self._ranges.enter_context(torch.cuda.profiler.profile())
            self._ranges.enter_context(torch.autograd.profiler.emit_nvtx())
            self._ranges.enter_context(torch.cuda.nvtx.range(f"titanlite: from step {self._step}"))

    def _save_trace(self, done: torch.profiler.profile) -> None:
        if self._step != self._last:  # the run ends within this trace
            return
        self._save("trace", "json.gz", done.export_chrome_trace)
        self._table = f"time per step up to step {self._step} on rank {self._rank}:\n"
        self._table += kernel_table(done.key_averages(), self._config.profiler_active)

    def _save(self, kind: str, ending: str, write: Callable[[str], object]) -> None:
        path = self._folder / f"{kind}-step-{self._step}-rank-{self._rank}.{ending}"
        try:
            if isinstance(path, Path):
                path.parent.mkdir(parents=True, exist_ok=True)
                write(str(path))
            else:
                with tempfile.TemporaryDirectory(prefix="titanlite-profile-") as local:
                    write(str(Path(local, path.name)))
                    upload(Path(local, path.name), path)
            logger.info(f"{kind} of step {self._step} in {path}")
        except OSError as e:  # a full disk does not end the run
            logger.error(f"{path} cannot be written: {e}")


def kernel_table(events: Any, steps: int) -> str:
    """The kernels that took longest, or on CPU the operators; times and calls are per step. torch's own table
    counts a kernel's time twice, for the kernel and for the operator that launched it."""
    on_device = [e for e in events if e.device_type.name == "CUDA" and not e.is_user_annotation]
    times = (
        {e.key: (e.self_device_time_total, e.count) for e in on_device}
        if on_device
        else {e.key: (e.self_cpu_time_total, e.count) for e in events if e.key != "ProfilerStep*"}
    )
    total = sum(time for time, _ in times.values()) or 1.0
    longest = sorted(times.items(), key=lambda item: -item[1][0])
    rows = [(name, time, count) for name, (time, count) in longest[:TABLE_ROWS]]
    if rest := longest[TABLE_ROWS:]:
        rows.append((f"{len(rest)} others", sum(t for _, (t, _) in rest), sum(c for _, (_, c) in rest)))
    lines = [f"{'ms':>9}  {'share':>6}  {'calls':>6}  name"]
    for name, time, count in rows:
        lines.append(f"{time / 1e3 / steps:9.2f}  {time / total:6.1%}  {count / steps:6.0f}  {name[:100]}")
    return "\n".join(lines)
