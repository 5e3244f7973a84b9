"""The first run, `./run_train.sh debug`, beside a plain loop over transformers' Llama of the same shape.

    python benchmarks/first_run.py --output benchmarks/results/first_run.json [--rounds 3] [--steps 60]

Three programs run in turns, each as a process of its own with all cores: a plain loop (Hugging Face's model,
torch's AdamW and gradient clipping, the same batch, accumulation and tokens), titanlite as it is shipped, and
titanlite with `--compile.enable` and an empty compiler cache. Two numbers each: tokens/s over the steps after
the tenth, and the seconds of the whole process, imports, data and compilation included. The machine should be
idle otherwise.
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

from benchmarks.environment import write_result  # noqa: E402

SEQ_LEN, MICRO_BATCH, GLOBAL_BATCH, SKIP = 128, 2, 16, 10
TITANLITE = {"titanlite": [], "titanlite, compiled": ["--compile.enable"]}


def main() -> None:
    """Run all three in turns, summarise, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plain", type=Path, help="run the plain loop on the tokens in this folder")
    options = parser.parse_args()
    if options.plain is not None:
        print(json.dumps(plain_loop(options.plain, options.steps)))
        return
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        train(Path(folder), cache, 1, [])  # tokenises
        runs = []
        for _ in range(options.rounds):
            runs.append({"program": "plain loop", **run_plain(cache, options.steps)})
            for name, keys in TITANLITE.items():
                runs.append({"program": name, **train(Path(folder), cache, options.steps, keys)})
            print(json.dumps(runs[-3:]), flush=True)
    medians = {
        name: {
            key: statistics.median(r[key] for r in runs if r["program"] == name)
            for key in ("tokens_per_s", "wall_s")
        }
        for name in ("plain loop", *TITANLITE)
    }
    base = medians["plain loop"]["tokens_per_s"]
    ratios = {name: medians[name]["tokens_per_s"] / base for name in TITANLITE}
    result = {"steps": options.steps, "medians": medians, "ratios_of_tokens_per_s": ratios}
    print(json.dumps(result, indent=1))
    if options.output is not None:
        write_result(options.output, {**result, "runs": runs}, "torch", "transformers")


def train(folder: Path, cache: Path, steps: int, keys: list[str]) -> dict[str, float]:
    """`./run_train.sh debug` of so many steps: tokens/s after the tenth, and the seconds of it all."""
    with tempfile.TemporaryDirectory(dir=folder) as run:
        env = os.environ | {"PYTHON": sys.executable, "TORCHINDUCTOR_CACHE_DIR": f"{run}/compiled"}
        command = [
            str(ROOT / "run_train.sh"), "debug", f"--training.steps={steps}", "--metrics.log_freq=1",
            f"--job.dump_folder={run}/run", f"--data.cache_dir={cache}", "--validation.enable=false",
            "--generation.prompts=[]", "--checkpoint.enable=false", *keys,
        ]  # fmt: skip
        began = time.perf_counter()
        subprocess.run(command, check=True, env=env, stderr=subprocess.DEVNULL)
        wall_s = time.perf_counter() - began
        lines = [json.loads(line) for line in Path(run, "run/metrics.jsonl").read_text().splitlines()]
    step_s = [line["time/step_s"] for line in lines[SKIP:]] or [1.0]
    return {"tokens_per_s": GLOBAL_BATCH * SEQ_LEN * len(step_s) / sum(step_s), "wall_s": wall_s}


def run_plain(cache: Path, steps: int) -> dict[str, float]:
    """The plain loop as a process."""
    command = [sys.executable, __file__, "--plain", str(next(cache.iterdir())), "--steps", str(steps)]
    began = time.perf_counter()
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return {**json.loads(done.stdout), "wall_s": time.perf_counter() - began}


def plain_loop(tokens_folder: Path, steps: int) -> dict[str, float]:
    """What one writes by hand: a model, an optimizer, a loop."""
    import numpy as np
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from titanlite.models.llama3 import Llama3

    tokens = np.memmap(next(tokens_folder.glob("*.bin")), dtype=np.uint16, mode="r")
    config: dict[str, Any] = Llama3(flavor="debug").hf_config()
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    rng = np.random.default_rng(0)
    accumulate, times = GLOBAL_BATCH // MICRO_BATCH, []
    for _ in range(steps):
        began = time.perf_counter()
        for _ in range(accumulate):
            begins = rng.integers(0, len(tokens) - SEQ_LEN, MICRO_BATCH)
            batch = torch.stack([torch.from_numpy(tokens[b : b + SEQ_LEN].astype(np.int64)) for b in begins])
            loss = model(input_ids=batch, labels=batch).loss / accumulate
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - began)
    counted = times[SKIP:] or times
    return {"tokens_per_s": GLOBAL_BATCH * SEQ_LEN * len(counted) / sum(counted)}


if __name__ == "__main__":
    main()
