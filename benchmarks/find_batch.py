"""Shows `titanlite tune --find-batch` on a GPU: finds the largest micro-batch of a job, trains 50 steps with
it, and starts once more with twice as many sequences, which must run out of memory.

    python benchmarks/find_batch.py --output benchmarks/results/NAME.json [--section.key=value ...]
        [--config train_configs/llama3_1b.toml] [--steps 50] [--ngpu 1]

Tokenizer and data are replaced by the shipped ones, as in throughput.py. training.global_batch_size = -1
follows the micro-batch, so that sizes between powers of two are found as well.
"""

from __future__ import annotations

import argparse
import json
import re
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

from benchmarks.environment import write_result  # noqa: E402
from benchmarks.throughput import RESERVED, SHIPPED_DATA, TPS  # noqa: E402

SETTINGS = [
    "--training.seq_len=4096",
    "--training.global_batch_size=-1",
    "--training.local_batch_size=1",
    "--metrics.log_freq=10",
    "--metrics.detail_freq=0",
]
OUT_OF_MEMORY = 5  # exit code
# What `tune` itself takes of the GPU's memory, which its runs could not use.
OWN_MEMORY = """
import os, subprocess
from titanlite.lab.find_batch import gpu
print(gpu())
query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
apps = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
print([app for app in apps if app.split(",")[0] == str(os.getpid())])
"""


def main() -> None:
    """Run the three commands and write what they printed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="train_configs/llama3_1b.toml")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--ngpu", type=int, default=1)
    parser.add_argument("--output", type=Path, required=True)
    options, overrides = parser.parse_known_args()
    words = [options.config, *SHIPPED_DATA, *SETTINGS, *overrides]
    result: dict[str, Any] = {"config": Path(options.config).name, "overrides": [*SETTINGS, *overrides]}
    result["ngpu"] = options.ngpu

    def save(**values: Any) -> None:  # after each command: the next may take too long
        result.update(values)
        write_result(options.output, result, "torch")

    if options.config != "debug":  # on a CPU
        own = subprocess.run([sys.executable, "-c", OWN_MEMORY], cwd=ROOT, capture_output=True, text=True)
        save(own_memory=(own.stdout + own.stderr).splitlines())
    search = run("tune", *words, "--find-batch", f"--gpus-per-trial={options.ngpu}")
    save(find_batch=search)
    match = re.search(r"largest that fits: --training.local_batch_size=(\d+)", search["printed"])
    if match is None:
        sys.exit("no micro-batch was found")
    size = int(match[1])
    whole = train(options, words, size, options.steps)
    save(answer=size, whole_run=whole)
    double = train(options, words, 2 * size, options.steps)
    save(double_run=double)
    summary = {"answer": size, "whole_run": whole["exit_code"], "double_run": double["exit_code"]}
    print(json.dumps(summary), flush=True)
    if (whole["exit_code"], double["exit_code"]) != (0, OUT_OF_MEMORY):
        sys.exit("not as it should be")


def run(verb: str, *words: str) -> dict[str, Any]:
    """Run `titanlite VERB ...`. Returns its time, its exit code, and what it printed."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "titanlite.cli", verb, *words]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout[-6000:], flush=True)
    wall_s = round(time.perf_counter() - began, 1)
    return {"wall_s": wall_s, "exit_code": done.returncode, "printed": done.stdout}


def train(options: argparse.Namespace, words: list[str], size: int, steps: int) -> dict[str, Any]:
    """Train `steps` steps with micro-batches of `size` sequences. Returns the result of `run` with the last
    lines that it printed, the highest reserved GiB and the median tokens/s after the first report."""
    with tempfile.TemporaryDirectory() as folder:
        own = [f"--training.local_batch_size={size}", f"--training.steps={steps}"]
        own.append(f"--job.dump_folder={folder}")
        done = run("launch", f"--nproc-per-node={options.ngpu}", *words, *own)
        metrics = Path(folder, "metrics.jsonl")
        lines = metrics.read_text().splitlines() if metrics.exists() else []
    reports = [json.loads(line) for line in lines]
    printed = done.pop("printed").replace(folder, "FOLDER").splitlines()
    done |= {"steps": reports[-1]["step"] if reports else 0, "last_lines": printed[-12:]}
    if len(reports) > 1:
        done["tokens_per_second_per_gpu"] = statistics.median(report[TPS] for report in reports[1:])
        done["peak_reserved_gib"] = max(report.get(RESERVED, 0.0) for report in reports)
    return done


if __name__ == "__main__":
    main()
