"""StepClock: the phase of its step in which a rank is, and the time that each phase took.

On CUDA times are taken by events on the compute stream, and only in measured steps; nothing waits for the
device until the times are read. On a CPU the host's clock measures every step. Other devices are not
measured."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal, NamedTuple

import torch

# In a step's order, with "statistics" within the forward. "forward_backward" stands for both with pipeline
# parallel and CUDA graphs. "end" lasts until the next step begins, and is not measured.
Phase = Literal["data", "start", "forward", "statistics", "backward", "forward_backward", "optimizer", "end"]


@dataclass(frozen=True)
class StepTimes:
    """Seconds per step of one rank, the mean over the measured steps."""

    step_s: float
    """From the wait for the step's batches to the end of the step."""
    phases: dict[Phase, float]
    """Seconds by phase. "data" is the time in which the host waited for batches."""
    wait_s: float
    """Time within the phases in which the rank waited for collectives."""
    host_bound: bool
    """Whether the device had come to the last phase but one, the backward, when the host had issued all of
    the last measured step. A device that sets the pace is further behind."""

    @property
    def own_s(self) -> float:
        """Seconds that the rank needed itself, without its waits for other ranks."""
        return max(self.step_s - self.wait_s, 0.0)


class _Moment(NamedTuple):
    """A moment on the host, and on CUDA one on the compute stream."""

    host: float
    event: torch.cuda.Event | None


class _Mark(NamedTuple):
    """The beginning of a phase."""

    phase: Phase
    at: _Moment


class StepClock:
    """The clock of one rank. A phase lasts until the next one begins.

    `on_phase` is called with the number of the step and the name of each phase that begins."""

    def __init__(self, device: torch.device, on_phase: Callable[[int, Phase], None] | None = None):
        self._device, self._on_phase = device.type, on_phase
        self._step, self._measures, self._host_bound = 0, False, True
        self._marks: list[_Mark] = []
        self._waits: list[tuple[_Moment, _Moment]] = []
        self._num_steps, self._step_s, self._wait_s = 0, 0.0, 0.0
        self._phases = defaultdict[Phase, float](float)
        self._free: list[torch.cuda.Event] = []  # making an event takes longer than recording one

    def begin(self, step: int, measured: bool) -> None:
        """Step `step` begins, with its phase "data". `measured`: whether it is measured on CUDA."""
        self._step, self._measures = step, measured if self._device == "cuda" else self._device == "cpu"
        self.enter("data")

    def enter(self, phase: Phase) -> None:
        """Begin `phase`, and end the phase before."""
        if self._on_phase is not None:
            self._on_phase(self._step, phase)
        if self._measures:
            self._marks.append(_Mark(phase, self._now()))

    def end(self) -> None:
        """The step has been issued."""
        if self._measures:
            backward = self._marks[-2:][0].at.event  # the beginning of the last phase but one
            self._host_bound = backward is None or backward.query()
            self._marks.append(_Mark("end", self._now()))
            self._measures = False
            if self._device == "cpu":
                self._add_up()
        if self._on_phase is not None:
            self._on_phase(self._step, "end")

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the body's time as waiting for collectives."""
        if not self._measures:
            yield
            return
        began = self._now()
        yield
        self._waits.append((began, self._now()))

    def waiting_in(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose time is counted as waiting for collectives."""

        @wraps(function)
        def timed(*args: Any, **options: Any) -> Any:
            if not self._measures:
                return function(*args, **options)
            with self.waiting():
                return function(*args, **options)

        return timed

    def times(self) -> StepTimes | None:
        """The times since the last `clear`; None without a measured step. Waits for the device."""
        self._add_up()
        num = self._num_steps
        if not num:
            return None
        return StepTimes(
            step_s=self._step_s / num,
            phases={phase: seconds / num for phase, seconds in self._phases.items()},
            wait_s=self._wait_s / num,
            host_bound=self._host_bound,
        )

    def clear(self) -> None:
        """Forget the measured steps."""
        self._add_up()
        self._num_steps, self._step_s, self._wait_s = 0, 0.0, 0.0
        self._phases.clear()

    def _add_up(self) -> None:
        """Add the marks and waits to the sums, and make their events free."""
        if self._marks and (last := self._marks[-1].at.event) is not None:
            last.synchronize()
        for mark, following in zip(self._marks, self._marks[1:]):
            if mark.phase != "end":
                seconds = _seconds(mark.at, following.at)
                self._step_s += seconds
                on_host = following.at.host - mark.at.host
                self._phases[mark.phase] += on_host if mark.phase == "data" else seconds
        self._num_steps += sum(mark.phase == "end" for mark in self._marks)
        self._wait_s += sum(_seconds(*wait) for wait in self._waits)
        moments = [mark.at for mark in self._marks] + [moment for wait in self._waits for moment in wait]
        self._free += [moment.event for moment in moments if moment.event is not None]
        self._marks, self._waits = [], []

    def _now(self) -> _Moment:
        event = None
        if self._device == "cuda":
            event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
            event.record()
        return _Moment(time.perf_counter(), event)


def _seconds(began: _Moment, ended: _Moment) -> float:
    if began.event is None or ended.event is None:
        return ended.host - began.host
    return began.event.elapsed_time(ended.event) / 1e3
