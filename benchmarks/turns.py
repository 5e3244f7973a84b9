"""Runs programs that count their steps in turns of a few seconds. All programs but one are stopped (SIGSTOP).

The speed of a virtual machine can change by 30% from minute to minute, so complete runs one after another
cannot be compared. Short turns share the machine's changes. Used by first_run.py and threads.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WARM_UP = 6  # steps before the first turn, for imports, compilation and first allocations
START_TIMEOUT_S = 300.0


@dataclass
class Program:
    """A command that appends one line to a file after each of its steps, and never ends by itself."""

    name: str
    command: list[str]
    lines: Path
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    """Variables added to the environment of this process."""

    def start(self) -> None:
        """Start the program, run WARM_UP steps, then stop it."""
        env = os.environ | self.environment
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                self.command, env=env, stdout=log, stderr=log, start_new_session=True
            )
        began = time.monotonic()
        while self.steps() < WARM_UP:
            time.sleep(0.1)
            if self._process.poll() is not None or time.monotonic() > began + START_TIMEOUT_S:
                raise RuntimeError(f"{self.name} did not start:\n{self.log.read_text()[-2000:]}")
        self._send(signal.SIGSTOP)

    def turn(self, seconds: float) -> float:
        """Let the program run for `seconds`. Returns the measured time."""
        began = time.perf_counter()
        self._send(signal.SIGCONT)
        time.sleep(seconds)
        self._send(signal.SIGSTOP)
        return time.perf_counter() - began

    def steps(self) -> int:
        """Return the number of finished steps."""
        return self.lines.read_bytes().count(b"\n") if self.lines.exists() else 0

    def kill(self) -> None:
        """Kill the program if it was started."""
        if hasattr(self, "_process") and self._process.poll() is None:
            self._send(signal.SIGKILL)
            self._process.wait()

    def _send(self, signum: int) -> None:
        os.killpg(self._process.pid, signum)


def take_turns(programs: list[Program], turns: int, seconds: float) -> dict[str, dict[str, Any]]:
    """Return for each program the steps per second of its turns, and the steps of each turn. Each round of
    turns begins with another program."""
    active = dict.fromkeys((p.name for p in programs), 0.0)
    steps: dict[str, list[int]] = {p.name: [] for p in programs}
    try:
        for program in programs:
            program.start()
        begun = {p.name: p.steps() for p in programs}
        for turn in range(turns):
            first = turn % len(programs)
            for program in programs[first:] + programs[:first]:
                active[program.name] += program.turn(seconds)
                steps[program.name].append(program.steps() - begun[program.name] - sum(steps[program.name]))
    finally:
        for program in programs:
            program.kill()
    return {
        name: {"steps_per_s": sum(counts) / active[name], "seconds": active[name], "steps": counts}
        for name, counts in steps.items()
    }
