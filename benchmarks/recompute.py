"""What each kind of recompute costs in time and saves in memory, by running the real trainer with each.

    python benchmarks/recompute.py train_configs/llama3_1b.toml --output benchmarks/results/NAME.json
        [--cases none,norms,...] [--section.key=value ...]

The first case is what the others are held against.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.environment import environment  # noqa: E402
from benchmarks.throughput import measure, medians  # noqa: E402

SELECTIVE = ("--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=")
CASES = {
    "none": [],
    **{name: [SELECTIVE[0], SELECTIVE[1] + name] for name in ("norms", "attention", "mlp", "op", "2")},
    "full": ["--activation_checkpoint.mode=full"],
    **{
        f"budget {share}": [
            "--activation_checkpoint.mode=memory_budget",
            f"--activation_checkpoint.memory_budget={share}",
        ]
        for share in (0.7, 0.4)
    },
}
TIME, MEMORY = "time/step_s", "memory/peak_allocated_gib"


def main() -> None:
    """Run the cases, print and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config")
    parser.add_argument("--ngpu", type=int, default=1)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--skip", type=int, default=10)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--output", type=Path, required=True)
    options, overrides = parser.parse_known_args()
    results: dict[str, dict[str, float]] = {}
    raw = {}
    for name in options.cases.split(","):
        run = measure(options, [*overrides, *CASES[name]])
        results[name], raw[name] = medians([run], "titanlite"), run["reports"]
        base = next(iter(results.values()))
        here = results[name]
        time, memory = (here[key] / base[key] - 1 for key in (TIME, MEMORY))
        print(
            f"{name:12} {here[TIME]:.3f} s {time:+6.1%}   {here[MEMORY]:5.1f} GiB {memory:+6.1%}", flush=True
        )
    output = {
        "config": Path(options.config).name,
        "overrides": overrides,
        "cases": results,
        "env": run["env"],
        "reports": raw,
        "environment": environment("torch"),
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(output, indent=1) + "\n")


if __name__ == "__main__":
    main()
