"""Wall time, CPU time and processes of a test command, and a limit for its CPU time.

    python benchmarks/suite.py [--max-cpu-seconds N] [--output FILE] -- pytest -n 2

CPU time includes all processes that the command starts, also those whose parent has ended: this process
adopts them. The limit is for CPU time, not wall time, because the machine may be busy. Processes are counted
by reading /proc twenty times per second, so very short ones are missed. The exit code is the command's, or 1
if the limit is exceeded or if a process outlives the command by ten seconds. The output file keeps the
results of other commands. Linux only."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.environment import environment  # noqa: E402

PR_SET_CHILD_SUBREAPER = 36  # of prctl(2)
LOOK_S, PATIENCE_S = 0.05, 10.0
COUNTS = re.compile(r"(\d+) (passed|failed|errors?|skipped|deselected|xfailed|warnings?)\b")


def main() -> None:
    """Run the command, print and write the result, and exit."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        usage="python benchmarks/suite.py [--max-cpu-seconds N] [--output FILE] -- COMMAND",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--max-cpu-seconds", type=float, default=float("inf"), help="fail above this")
    parser.add_argument("--output", type=Path, help="JSON file to add the result to")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    if shutil.which(options.command[0]) is None:
        parser.error(f"there is no command {options.command[0]!r}")
    command, known = " ".join(options.command), {}
    if options.output:  # checked before the run, which may take long
        try:
            known = json.loads(options.output.read_text()) if options.output.exists() else {}
            if not isinstance(known, dict):
                raise ValueError("it does not hold a JSON object")
            options.output.parent.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as e:
            parser.error(f"--output={options.output}: {e}")
    load, began = os.getloadavg(), time.monotonic()
    code, cpu_s, processes, left, last = run(options.command)
    result = {
        "exit_code": code,
        "wall_s": round(time.monotonic() - began, 1),
        "cpu_s": round(cpu_s, 1),
        "processes": processes,
        "processes_left": left,
        "load_average_before": load,
        **{outcome: int(count) for count, outcome in COUNTS.findall(last)},
    }
    print(
        f"{result['wall_s']} s, {result['cpu_s']} CPU seconds, {processes} processes, "
        f"load average {load[0]:.1f} before"
    )
    if options.output:
        known[command] = result | {"environment": environment("torch", "pytest", "pytest-xdist")}
        options.output.write_text(json.dumps(known, indent=1) + "\n")
    if left:
        sys.exit(f"{left} processes outlived the command by {PATIENCE_S:.0f} s")
    if cpu_s > options.max_cpu_seconds:
        sys.exit(f"{cpu_s:.1f} CPU seconds; at most {options.max_cpu_seconds:g} are allowed")
    sys.exit(code if code >= 0 else 128 - code)


def run(command: list[str]) -> tuple[int, float, int, int, str]:
    """Run a command. Returns the exit code, CPU seconds, number of processes, number of processes that
    outlive the command, and the last line of output that is not empty."""
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        sys.exit("this process cannot adopt orphans, whose CPU time would be missing: prctl failed")
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    assert process.stdout is not None
    lines = [""]
    reader = threading.Thread(target=_pass_on, args=(process.stdout, lines), daemon=True)
    reader.start()
    seen: set[tuple[int, str]] = set()
    code, cpu_s, until = None, 0.0, float("inf")
    while time.monotonic() < until:
        seen |= _descendants()
        try:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:  # no child is left
            break
        if pid:
            cpu_s += usage.ru_utime + usage.ru_stime
            if pid == process.pid:
                code, until = os.waitstatus_to_exitcode(status), time.monotonic() + PATIENCE_S
        else:
            time.sleep(LOOK_S)
    left = _descendants()
    for pid, _ in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    reader.join(PATIENCE_S)
    return code or 0, cpu_s, len(seen), len(left), lines[0]


def _pass_on(output: IO[str], lines: list[str]) -> None:
    """Print the command's output, and keep its last line."""
    for line in output:
        print(line, end="", flush=True)
        lines[0] = line if line.strip() else lines[0]


def _descendants() -> set[tuple[int, str]]:
    """Return (pid, start time) of all descendants of this process."""
    parents: dict[int, tuple[int, str]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with suppress(OSError):  # the process has ended
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                parents[int(entry)] = (int(fields[1]), fields[19])
    descendants, new = set[int](), {os.getpid()}
    while new:
        new = {pid for pid, (parent, _) in parents.items() if parent in new}
        descendants |= new
    return {(pid, parents[pid][1]) for pid in descendants}


if __name__ == "__main__":
    main()
