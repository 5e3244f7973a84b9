"""Tokens/s of the debug model on a CPU for several ways in which OpenMP's threads wait for each other, on an
idle and on a busy machine.

    python benchmarks/threads.py [--busy 0 4] [--turns 8] [--seconds 3] [--output FILE]

`./run_train.sh debug` without validation, checkpoints and samples, once per setting, in turns (turns.py).
"busy" is the number of other processes that compute all the time. A setting is selected by an environment
variable, which overrides titanlite's default. "plain loop" is the loop of first_run.py with torch's defaults.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.environment import write_result  # noqa: E402
from benchmarks.first_run import ENDLESS, GLOBAL_BATCH, SEQ_LEN, debug_run, plain  # noqa: E402
from benchmarks.turns import Program, take_turns  # noqa: E402

SETTINGS = {
    "libgomp's default": {"GOMP_SPINCOUNT": "300000"},
    "spin 30,000 times": {"GOMP_SPINCOUNT": "30000"},
    "spin 5,000 times": {"GOMP_SPINCOUNT": "5000"},
    "spin 1,000 times": {"GOMP_SPINCOUNT": "1000"},
    "spin 100 times": {"GOMP_SPINCOUNT": "100"},
    "never spin": {"GOMP_SPINCOUNT": "0"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}


def main() -> None:
    """Measure all settings, print and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds per turn")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results = []
    for busy in options.busy:
        with tempfile.TemporaryDirectory() as name:
            folder, cache = Path(name), Path(name, "cache")
            first = debug_run(folder / "first", cache, 1)
            subprocess.run(first, check=True, stderr=subprocess.DEVNULL)  # tokenises
            programs = [plain(folder, cache, ENDLESS)]
            for i, (setting, env) in enumerate(SETTINGS.items()):
                run = folder / str(i)
                command = [*debug_run(run, cache, ENDLESS), "--lr_scheduler.warmup_steps=16"]
                programs.append(Program(setting, command, run / "metrics.jsonl", folder / f"{i}.log", env))
            others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
            try:
                turns = take_turns(programs, options.turns, options.seconds)
            finally:
                for process in others:
                    process.kill()
                    process.wait()
        for setting, measured in turns.items():
            rate = measured["steps_per_s"] * GLOBAL_BATCH * SEQ_LEN
            results.append({"busy": busy, "setting": setting, "tokens_per_s": rate, **measured})
            print(f"{busy:3} busy  {setting:18} {rate:9,.0f} tokens/s", flush=True)
    if options.output:
        write_result(options.output, {"results": results}, "torch", "titanlite")


if __name__ == "__main__":
    main()
