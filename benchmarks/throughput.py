"""Tokens/s, MFU and peak memory of a training configuration, measured by running the real trainer on real
text.

    python benchmarks/throughput.py train_configs/llama3_1b.toml --ngpu 1 --output
    benchmarks/results/NAME.json \
        [--section.key=value ...]

Tokenizer and data are replaced by the shipped ones (the standard library's source), so that nothing has to be
downloaded; the model, its vocabulary and every kernel stay the configuration's. Medians are over the reports
after the first `--skip` steps; the raw metrics.jsonl and the environment are part of the output.
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

ROOT = Path(__file__).resolve().parents[1]
SHIPPED_DATA = [
    f"--tokenizer.path={ROOT / 'assets/tokenizer/stdlib.tiktoken'}",
    "--tokenizer.num_special_tokens=2",
    '--data.sources=[{name="python_stdlib"}]',
    "--data.holdout_rows=0",
    "--validation.enable=false",
    "--checkpoint.enable=false",
    "--metrics.enable_tensorboard=false",
    "--metrics.log_freq=5",
    "--lr_scheduler.warmup_steps=10",
]


def main() -> None:
    """Run, summarise, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config")
    parser.add_argument("--ngpu", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--skip", type=int, default=10, help="steps before the first report that counts")
    parser.add_argument("--output", type=Path, required=True)
    options, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [str(ROOT / "run_train.sh"), options.config, f"--training.steps={options.steps}"]
        command += [*SHIPPED_DATA, *overrides, f"--job.dump_folder={folder}"]
        began = time.perf_counter()
        environment = os.environ | {"NGPU": str(options.ngpu), "PYTHON": sys.executable}
        subprocess.run(command, env=environment, check=True)
        wall_s = time.perf_counter() - began
        rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        env = json.loads((Path(folder) / "env.json").read_text())
    counted = [row for row in rows if row["step"] > options.skip]
    keys = [
        "throughput/tokens_per_second_per_device",
        "throughput/mfu",
        "time/step_s",
        "time/data_wait_pct",
        "memory/peak_allocated_gib",
        "memory/peak_reserved_gib",
    ]
    medians = {
        k: statistics.median(row[k] for row in counted) for k in keys if all(k in row for row in counted)
    }
    summary = {
        "config": Path(options.config).name,
        "overrides": overrides,
        "ngpu": options.ngpu,
        "wall_s": wall_s,
    }
    result = {**summary, "medians": medians, "loss": rows[-1]["train/loss"], "env": env, "metrics": rows}
    del result["env"]["command"]  # it holds this machine's temporary folder
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({**summary, **medians, "first_step_s": rows[0]["time/step_s"]}))


if __name__ == "__main__":
    main()
