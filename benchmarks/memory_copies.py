"""Steps per second of the debug model on a CPU with copies of its state in memory, and without.

    python benchmarks/memory_copies.py [--intervals 0 50 10 1] [--turns 10] [--seconds 3] [--output FILE]

`./run_train.sh debug` without validation, samples and saves, once per checkpoint.memory_interval, in turns
(turns.py). Copying and hashing use the cores on which the model is trained: on a machine with GPUs they do
not. The log of each program has the size of a copy and the time until it is complete.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.environment import write_result  # noqa: E402
from benchmarks.first_run import ENDLESS, debug_run  # noqa: E402
from benchmarks.turns import Program, take_turns  # noqa: E402


def main() -> None:
    """Measure all intervals, print and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--intervals", type=int, nargs="+", default=[0, 50, 10, 1])
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds per turn")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        folder, cache = Path(name), Path(name, "cache")
        first = debug_run(folder / "first", cache, 1)
        subprocess.run(first, check=True, stderr=subprocess.DEVNULL)  # tokenises
        programs = []
        for interval in options.intervals:
            run = folder / str(interval)
            command = [
                *debug_run(run, cache, ENDLESS), "--lr_scheduler.warmup_steps=16", "--checkpoint.enable=true",
                f"--checkpoint.interval={ENDLESS}", f"--checkpoint.memory_interval={interval}",
            ]  # fmt: skip
            env = {"TITANLITE_SHM": memory}
            log = folder / f"{interval}.log"
            programs.append(Program(str(interval), command, run / "metrics.jsonl", log, env))
        turns = take_turns(programs, options.turns, options.seconds)
        for program in programs:
            measured = turns[program.name]
            copy = re.search(r"copied step \d+ to memory in .*", program.log.read_text())
            line = copy[0] if copy else ""
            records = map(json.loads, program.lines.read_text().splitlines())
            pauses = [record["checkpoint/copy_s"] for record in records if "checkpoint/copy_s" in record]
            pause_s = statistics.median(pauses) if pauses else 0.0
            about = {"memory_interval": int(program.name), "first_copy": line, "median_pause_s": pause_s}
            results.append({**about, **measured})
            rate = f"{measured['steps_per_s']:6.3f} steps/s, pause of training {pause_s * 1000:.1f} ms"
            print(f"interval {program.name:>3}  {rate}  {line}", flush=True)
    if options.output:
        write_result(options.output, {"results": results}, "torch", "titanlite")


if __name__ == "__main__":
    main()
