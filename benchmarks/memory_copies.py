"""What copies of the state in memory cost a run without faults.

    python benchmarks/memory_copies.py [--intervals 0 50 10 1] [--turns 10] [--seconds 3] [--output FILE]
    python benchmarks/memory_copies.py --config train_configs/llama3_1b.toml [--ngpu 1] [--steps 200]
        [--rounds 2] [--intervals 0 -1] [--output FILE] [--section.key=value ...]

Without --config: `./run_train.sh debug` on a CPU without validation, samples and saves, once per
checkpoint.memory_interval, in turns (turns.py). Copying and hashing use the cores on which the model is
trained: on a machine with GPUs they do not. The log of each program has the size of a copy and the time until
it is complete.

With --config: whole runs in turns, with the data of throughput.py. The seconds per step are those of all
steps after the tenth, with the pauses for copies.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.environment import write_result  # noqa: E402
from benchmarks.first_run import ENDLESS, debug_run  # noqa: E402
from benchmarks.throughput import measure  # noqa: E402
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
    parser.add_argument("--config", help="a TOML file: measure whole runs")
    parser.add_argument("--ngpu", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=2)
    parser.set_defaults(skip=10)  # steps of whole runs before those that count
    options, overrides = parser.parse_known_args()
    if options.config is None and overrides:
        parser.error(f"{overrides[0]} needs --config")
    results = list[dict[str, Any]]()
    # After each run: earlier ones are not lost if a limit on the time ends this program.
    for result in whole_runs(options, overrides) if options.config else debug_runs(options):
        results.append(result)
        if options.output:
            write_result(options.output, {"results": results}, "torch", "titanlite")


def whole_runs(options: argparse.Namespace, overrides: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Run the job with each interval, in turns."""
    for _ in range(options.rounds):
        for interval in options.intervals:
            keys = [
                "--checkpoint.enable=true", f"--checkpoint.interval={ENDLESS}",
                f"--checkpoint.memory_interval={interval}", *overrides,
            ]  # fmt: skip
            run = measure(options, keys)
            total_s, pauses_s, before = 0.0, 0.0, options.skip
            for report in run["counted"]:
                total_s += report["time/step_s"] * (report["step"] - before)
                pauses_s += report.get("checkpoint/copy_s", 0.0)
                before = report["step"]
            step_s = (total_s + pauses_s) / (options.steps - options.skip)
            print(f"interval {interval:>3}  {step_s:.4f} s per step, pauses {pauses_s:.2f} s", flush=True)
            yield {"memory_interval": interval, "step_s": step_s, "pauses_s": pauses_s, **run}


def debug_runs(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run the debug model with each interval, all at the same time, in turns of some seconds."""
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
            rate = f"{measured['steps_per_s']:6.3f} steps/s, pause of training {pause_s * 1000:.1f} ms"
            print(f"interval {program.name:>3}  {rate}  {line}", flush=True)
            yield {**about, **measured}


if __name__ == "__main__":
    main()
