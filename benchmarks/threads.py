"""Tokens per second of the debug model on a CPU, for several ways in which OpenMP's threads may wait, on an
idle machine and on one that is busy with other work.

    python benchmarks/threads.py [--busy 0 4 16] [--seconds 20] [--repeats 3] [--output FILE]

Each measurement is one `titanlite train train_configs/debug.toml` without validation, checkpoints and
samples, ended after `seconds`; the first step is not counted. "busy" is the number of other processes that
compute all the time. The settings take turns, so that a change of the machine's own load meets all of them. A
user's setting wins over titanlite's default, which is how this script selects one. On a machine that others
use, `chrt -f 1 python benchmarks/threads.py --busy 0` is close to an idle one: no other process is let in,
which holds them up. A run that finishes no step after its first one counts as 0 tokens/s: read the number of
steps beside the rate.
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

from environment import environment

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = {
    "libgomp's default": {"GOMP_SPINCOUNT": "300000"},
    "spin 10,000 times": {"GOMP_SPINCOUNT": "10000"},
    "spin 1,000 times": {"GOMP_SPINCOUNT": "1000"},
    "spin 100 times": {"GOMP_SPINCOUNT": "100"},
    "never spin": {"GOMP_SPINCOUNT": "0"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
QUIET = (
    "--no-validation.enable",
    "--no-checkpoint.enable",
    "--generation.prompts=[]",
    "--metrics.log_freq=1",
    "--training.steps=10000",
)


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 4, 16])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), {}, 0, seconds=300, steps=1)  # the text is tokenised once
        for busy in options.busy:
            taken: dict[str, list[dict[str, float]]] = {name: [] for name in options.settings}
            for _ in range(options.repeats):
                for name in options.settings:
                    taken[name].append(measure(Path(folder), SETTINGS[name], busy, options.seconds))
            for name, runs in taken.items():
                rate = statistics.median(run["tokens_per_second"] for run in runs)
                results.append({"busy": busy, "setting": name, "tokens_per_second": rate, "runs": runs})
                print(f"{busy:3} busy  {name:18} {rate:9,.0f} tokens/s", flush=True)
    if options.output:
        result = {
            "what": "tokens/s of the debug model on a CPU, by how OpenMP's threads wait",
            "seconds": options.seconds,
            "cores": os.cpu_count(),
            "results": results,
            "env": environment("titanlite", "torch"),
        }
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n")


def measure(
    folder: Path, setting: dict[str, str], busy: int, seconds: float = 0, steps: int = 10**9
) -> dict[str, float]:
    """Train for `seconds` after the first step, or for `steps` steps."""
    run = Path(tempfile.mkdtemp(dir=folder))
    log = run / "metrics.jsonl"
    command = [sys.executable, "-m", "titanlite.cli", "train", str(ROOT / "train_configs/debug.toml"), *QUIET]
    command += [f"--job.dump_folder={run}", f"--data.cache_dir={folder / 'cache'}"]
    environ = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")}
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    trainer = subprocess.Popen(command, cwd=ROOT, env=environ | setting, stderr=subprocess.DEVNULL)
    began, rows = 0.0, []
    try:
        while len(rows) < 1 + steps and (not rows or time.monotonic() < began + seconds):
            assert trainer.poll() is None, "the trainer ended"
            time.sleep(0.2)
            text = log.read_text() if log.exists() else ""
            rows = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
            began = began or (time.monotonic() if rows else 0.0)
    finally:
        trainer.kill()
        for process in others:
            process.kill()
            process.wait()
        _, _, usage = os.wait4(trainer.pid, 0)
    taken = sum(row["time/step_s"] for row in rows[1:])
    tokens = rows[-1]["progress/total_tokens"] - rows[0]["progress/total_tokens"]
    return {
        "steps": len(rows),
        "tokens_per_second": tokens / taken if taken else 0.0,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
    }


if __name__ == "__main__":
    main()
