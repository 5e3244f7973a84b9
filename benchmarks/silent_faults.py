"""The cost of checks for silent faults (guard.fault_check_freq): the times of a check and of a step.

    python benchmarks/silent_faults.py train_configs/debug.toml --output benchmarks/results/NAME.json
        [--ngpu 1,2] [--steps 60] [--freq 10] [--section.key=value ...]

Each number of ranks is one run. The step time is the median of the reports after the first, and leaves the
checks out; the output has the raw numbers and the environment.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.environment import write_result  # noqa: E402


def main() -> None:
    """Run all numbers of ranks and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config")
    parser.add_argument("--ngpu", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--freq", type=int, default=10)
    parser.add_argument("--output", type=Path, required=True)
    options, overrides = parser.parse_known_args()
    runs = [measure(options, ngpu, overrides) for ngpu in options.ngpu]
    result = {"config": Path(options.config).name, "overrides": overrides, "freq": options.freq, "runs": runs}
    write_result(options.output, result, "torch")


def measure(options: argparse.Namespace, ngpu: int, overrides: list[str]) -> dict[str, Any]:
    """The median times of a check and of a step on `ngpu` ranks, in seconds, and the share of time that
    checks every 100 steps would take."""
    with tempfile.TemporaryDirectory() as folder:
        keys = [f"--job.dump_folder={folder}", f"--training.steps={options.steps}", "--metrics.log_freq=1"]
        keys += ["--training.deterministic", f"--guard.fault_check_freq={options.freq}", "--metrics.sinks=[]"]
        keys += ["--metrics.detail_freq=0", "--no-validation.enable", "--no-checkpoint.enable"]
        command = [ROOT / "run_train.sh", options.config, *keys, "--generation.prompts=[]", *overrides]
        subprocess.run(command, check=True, env=os.environ | {"NGPU": str(ngpu), "PYTHON": sys.executable})
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    checks = [line["time/fault_check_s"] for line in lines if "time/fault_check_s" in line]
    steps = [line["time/step_s"] for line in lines[1:]]
    check_s, step_s = median(checks), median(steps)
    share = check_s / (100 * step_s + check_s)
    run = {"ngpu": ngpu, "check_s": check_s, "step_s": step_s, "share_every_100_steps": share}
    print(json.dumps(run), flush=True)
    return {**run, "checks": checks, "steps": steps}


if __name__ == "__main__":
    main()
