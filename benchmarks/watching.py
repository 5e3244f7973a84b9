"""The cost of watching a run: tokens/s with the guard's outlier and spike detection, detailed reports and a
sink, against a run without them. The two runs take turns.

    python benchmarks/watching.py train_configs/llama3_1b.toml --output benchmarks/results/NAME.json
        [--rounds 2] [--steps 130] [--section.key=value ...]

Tokens/s are those of all steps after the first `--skip`, not a median, because a detailed report makes single
steps slower. The output has the raw reports and the environment.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.environment import write_result  # noqa: E402
from benchmarks.throughput import RESERVED, TPS, measure  # noqa: E402

WITHOUT = ["--guard.skip_sigma=0", "--metrics.detail_freq=0", "--metrics.sinks=[]"]
WITH = ["--guard.skip_sigma=6", "--metrics.detail_freq=100", "--metrics.sinks=[{name = 'tensorboard'}]"]


def main() -> None:
    """Run all rounds and write the summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config")
    parser.add_argument("--ngpu", type=int, default=1)
    parser.add_argument("--steps", type=int, default=130)
    parser.add_argument("--skip", type=int, default=20, help="steps before the first report that counts")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path, required=True)
    options, overrides = parser.parse_known_args()
    runs: dict[str, list[dict[str, Any]]] = {"without": [], "with": []}
    for _ in range(options.rounds):
        for name, keys in (("without", WITHOUT), ("with", WITH)):
            runs[name].append(measure(options, [*overrides, *keys]))
            print(json.dumps({name: summary(runs[name][-1:])}), flush=True)
    summaries = {name: summary(measured) for name, measured in runs.items()}
    without = summaries["without"]
    ratios = {key: summaries["with"][key] / without[key] for key in (TPS, RESERVED) if key in without}
    result = {
        "config": Path(options.config).name,
        "overrides": overrides,
        "keys": {"without": WITHOUT, "with": WITH},
        "summaries": summaries,
        "ratios": ratios,
    }
    print(json.dumps(result))
    write_result(options.output, {**result, "runs": runs}, "torch")


def summary(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Tokens/s per GPU over the time of all counted steps, with the number of steps; peak reserved
    memory on GPUs."""
    seconds = tokens = num_steps = 0.0
    for run in runs:
        reports = run["reports"]
        for before, report in pairwise(reports):
            if report in run["counted"]:
                steps = report["step"] - before["step"]
                seconds += steps * report["time/step_s"]
                tokens += steps * report["time/step_s"] * report[TPS]
                num_steps += steps
    memory = [report[RESERVED] for run in runs for report in run["counted"] if RESERVED in report]
    return {TPS: tokens / seconds, "steps": num_steps} | ({RESERVED: max(memory)} if memory else {})


if __name__ == "__main__":
    main()
