"""Step time and peak memory for each mode of activation checkpointing, measured with the real trainer.

    python benchmarks/activation_checkpointing.py train_configs/llama3_1b.toml
        --output benchmarks/results/NAME.json [--cases norms,mlp,...] [--devices 0,1] [--section.key=value
        ...]

Each case is compared with a run without activation checkpointing on the same device.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.devices import on_devices  # noqa: E402
from benchmarks.environment import write_result  # noqa: E402
from benchmarks.throughput import measure, medians  # noqa: E402

SELECTIVE = ("--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=")
CASES = {
    **{
        name: [SELECTIVE[0], SELECTIVE[1] + name]
        for name in ("norms", "attention", "mlp", "norms+mlp", "op", "2")
    },
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
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--skip", type=int, default=10)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--devices", default="0", help="devices to use, one case at a time per device")
    parser.add_argument("--output", type=Path, required=True)
    options, overrides = parser.parse_known_args()
    options.ngpu = 1
    without: dict[str, dict[str, Any]] = {}  # by device

    def compare(device: str, name: str) -> dict[str, Any]:
        if device not in without:
            without[device] = measure(options, overrides, device)
        run = measure(options, [*overrides, *CASES[name]], device)
        result, base = medians([run], "titanlite"), medians([without[device]], "titanlite")
        time, memory = (result[key] / base[key] - 1 for key in (TIME, MEMORY))
        times, peaks = f"{result[TIME]:.3f} s {time:+6.1%}", f"{result[MEMORY]:5.1f} GiB {memory:+6.1%}"
        print(f"{name:12} {times}   {peaks}", flush=True)
        return {"name": name, "time": time, "memory": memory, "device": device, **run}

    cases = on_devices(options.devices.split(","), options.cases.split(","), compare)
    output = {
        "config": Path(options.config).name,
        "overrides": overrides,
        "cases": cases,
        "without": without,
    }
    write_result(options.output, output, "torch")


if __name__ == "__main__":
    main()
