"""Step time and memory of titanlite's optimizers with the 1B model, beside torch.optim.Muon and torchao's
AdamW8bit.

    python benchmarks/optimizer_steps.py --output benchmarks/results/NAME.json [--ngpu 2]
        [--tokens-per-step 1048576] [--steps 8] [--rounds 2] [--cases adamw,muon] [--budget-s 500]
        [--section.key=value ...]

Tokenizer and data are those of throughput.py. The cases take turns, each in a run of its own, `--rounds`
times. A step's time is the median over the steps after the first `--skip` of all rounds, without the last
step, whose detailed report costs time. The optimizer's time is from that report: gradient norm, clipping and
optimizer step. torch's and torchao's optimizers run through the interface of optimizers from outside the
package, which makes the host wait for the device once per step. A case that fails is recorded with its error.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.environment import without_paths, write_result  # noqa: E402
from benchmarks.throughput import RESERVED, TPS, measure  # noqa: E402

COMPONENTS = '--job.imports=["benchmarks.optimizer_components"]'
ADAMW = "--optimizer.name=adamw"
CASES = {
    "adamw": [ADAMW],
    "muon": ["--optimizer.name=muon"],
    "adamw int8": [ADAMW, "--optimizer.state_dtype=int8"],
    "adamw bfloat16": [ADAMW, "--optimizer.state_dtype=bfloat16"],
    "torch.optim.Muon": ["--optimizer.name=torch_muon"],
    "torchao AdamW8bit": ["--optimizer.name=torchao_adamw8bit"],
}
STEP, OPTIMIZER = "time/step_s", "time/optimizer_s"
MEMORY = (RESERVED, "memory/peak_allocated_gib")


def main() -> None:
    """Run all rounds and write the summary after each run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default=str(ROOT / "train_configs/llama3_1b.toml"))
    parser.add_argument("--ngpu", type=int, default=1)
    parser.add_argument("--tokens-per-step", type=int, default=131072)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--local-batch-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--skip", type=int, default=2, help="steps before the first report that counts")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--budget-s", type=float, default=500, help="no run starts after this time")
    parser.add_argument("--output", type=Path, required=True)
    options, overrides = parser.parse_known_args()
    if options.steps < options.skip + 2:
        parser.error("--steps is to be at least --skip + 2: the last step does not count")
    keys = [
        "--compile.enable",
        f"--training.seq_len={options.seq_len}",
        f"--training.local_batch_size={options.local_batch_size}",
        f"--training.global_batch_size={options.tokens_per_step // options.seq_len}",
        "--lr_scheduler.warmup_steps=0",
        "--metrics.log_freq=1",
        f"--metrics.detail_freq={options.steps}",
        COMPONENTS,
        *overrides,
    ]
    names, began = options.cases.split(","), time.monotonic()
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(options.rounds):
        for name in names:
            if time.monotonic() - began > options.budget_s:
                print(f"no time for {name}")
                continue
            runs[name].append(run_case(options, [*keys, *CASES[name]]))
            print(json.dumps({name: summary(runs[name][-1:], options)}), flush=True)
            write(options, overrides, runs)


def run_case(options: argparse.Namespace, keys: list[str]) -> dict[str, Any]:
    """Run one case once. Returns its reports, or the end of its output if it failed."""
    with tempfile.TemporaryDirectory() as name:
        state_bytes = Path(name) / "state_bytes"
        os.environ["STATE_BYTES_FILE"] = str(state_bytes)
        folder = Path(name) / "run"
        try:
            run = measure(options, keys, folder=folder)
        except (subprocess.CalledProcessError, OSError) as e:
            return {"error": f"{type(e).__name__}\n{without_paths((folder / 'log.txt').read_text()[-3000:])}"}
        size = float(state_bytes.read_text()) if state_bytes.exists() else None
        return {**run, "state_bytes_per_parameter": size}


def summary(runs: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """The numbers of one case over its runs. Memory is the largest; all others are medians."""
    if not runs or "error" in runs[-1]:
        return {"error": runs[-1]["error"]} if runs else {}
    counted = [report for run in runs for report in run["counted"] if report["step"] < options.steps]
    last = [run["reports"][-1] for run in runs]
    result = {
        TPS: statistics.median(report[TPS] for report in counted),
        STEP: statistics.median(report[STEP] for report in counted),
        OPTIMIZER: statistics.median(report[OPTIMIZER] for report in last),
        "state_bytes_per_parameter": runs[-1]["state_bytes_per_parameter"],
    }
    memory = {key: max(report[key] for report in counted) for key in MEMORY if key in counted[0]}
    return result | memory | {"steps": len(counted)}


def write(options: argparse.Namespace, overrides: list[str], runs: dict[str, list[dict[str, Any]]]) -> None:
    """Write what has been measured so far, with ratios to AdamW."""
    summaries = {name: summary(measured, options) for name, measured in runs.items()}
    adamw = summaries.get("adamw", {})
    ratios = {
        name: {
            key: numbers[key] / adamw[key] for key in (TPS, STEP, *MEMORY) if key in numbers and key in adamw
        }
        for name, numbers in summaries.items()
    }
    result = {
        "config": Path(options.config).name,
        "ngpu": options.ngpu,
        "tokens_per_step": options.tokens_per_step,
        "local_batch_size": options.local_batch_size,
        "seq_len": options.seq_len,
        "overrides": overrides,
        "keys": {name: CASES[name] for name in runs},
        "summaries": summaries,
        "ratios_to_adamw": ratios,
        "runs": runs,
    }
    write_result(options.output, result, "torch", "torchao")


if __name__ == "__main__":
    main()
