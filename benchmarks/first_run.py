"""Speed of the first run, `./run_train.sh debug`, and of a plain loop with transformers' Llama of equal
shape.

    python benchmarks/first_run.py [--turns 12] [--seconds 3] [--micro-batch 2]
        [--output benchmarks/results/FILE]

The plain loop has Hugging Face's model, torch's AdamW and gradient clipping, and the same micro-batch,
accumulation and tokens. It runs in turns (turns.py) with titanlite: with and without `--compile.enable`, with
titanlite's GOMP_SPINCOUNT and with libgomp's default, which the plain loop has (threads.py). After that the
wall time of complete runs of `--steps` steps is measured, including imports and compilation into an empty
cache. The machine should be idle otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
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
from benchmarks.turns import Program, take_turns  # noqa: E402

SEQ_LEN, GLOBAL_BATCH = 128, 16
LIBGOMPS = {"GOMP_SPINCOUNT": "300000"}
MICRO_BATCH = 2  # sequences, as in train_configs/debug.toml
ENDLESS = 1_000_000  # steps
VARIANTS: dict[str, tuple[list[str], dict[str, str]]] = {
    "titanlite": ([], {}),
    "titanlite, compiled": (["--compile.enable"], {}),
    "titanlite, libgomp's waiting": ([], LIBGOMPS),
    "titanlite, compiled, libgomp's waiting": (["--compile.enable"], LIBGOMPS),
}


def main() -> None:
    """Run all programs in turns, then complete runs, and write the summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds per turn")
    parser.add_argument("--steps", type=int, default=60, help="steps per complete run")
    parser.add_argument(
        "--micro-batch", type=int, default=MICRO_BATCH, help="sequences per micro-batch, of all programs"
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument(
        "--plain", type=Path, nargs=2, help="run the plain loop: folder of tokens, file of lines"
    )
    options = parser.parse_args()
    if options.plain is not None:
        tokens, lines = options.plain
        plain_loop(tokens, lines, options.steps, options.micro_batch)
        return
    with tempfile.TemporaryDirectory() as name:
        folder, cache = Path(name), Path(name, "cache")
        subprocess.run(
            debug_run(folder / "first", cache, 1, options.micro_batch), check=True, stderr=subprocess.DEVNULL
        )  # tokenises
        programs = [plain(folder, cache, ENDLESS, options.micro_batch)]
        for i, (variant, (keys, env)) in enumerate(VARIANTS.items()):
            run, compiled = folder / str(i), {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/{i}/compiled"}
            command = [
                *debug_run(run, cache, ENDLESS, options.micro_batch),
                "--lr_scheduler.warmup_steps=16",
                *keys,
            ]
            programs.append(
                Program(variant, command, run / "metrics.jsonl", folder / f"{i}.log", env | compiled)
            )
        turns = take_turns(programs, options.turns, options.seconds)
        whole = plain(folder / "whole", cache, options.steps, options.micro_batch)
        wall_s = {"plain loop": seconds_of(whole.command, folder)}
        for i, variant in enumerate(("titanlite", "titanlite, compiled")):
            run = folder / f"whole-{i}"
            command = [*debug_run(run, cache, options.steps, options.micro_batch), *VARIANTS[variant][0]]
            wall_s[variant] = seconds_of(command, run)
    base = turns["plain loop"]["steps_per_s"]
    result = {
        "tokens_per_s": {name: t["steps_per_s"] * GLOBAL_BATCH * SEQ_LEN for name, t in turns.items()},
        "ratios_to_the_plain_loop": {name: t["steps_per_s"] / base for name, t in turns.items()},
        "micro_batch": options.micro_batch,
        "whole_run": {"steps": options.steps, "wall_s": wall_s},
    }
    print(json.dumps(result, indent=1))
    if options.output is not None:
        write_result(options.output, {**result, "turns": turns}, "torch", "transformers")


def debug_run(run: Path, cache: Path, steps: int, micro_batch: int = MICRO_BATCH) -> list[str]:
    """Return the command of `./run_train.sh debug` for `steps` steps, with metrics of each step and without
    validation, samples or checkpoints."""
    return [
        "env", f"PYTHON={sys.executable}", str(ROOT / "run_train.sh"), "debug",
        f"--training.steps={steps}", "--metrics.log_freq=1", f"--job.dump_folder={run}",
        f"--data.cache_dir={cache}", "--validation.enable=false", "--generation.prompts=[]",
        "--checkpoint.enable=false", f"--training.local_batch_size={micro_batch}",
    ]  # fmt: skip


def plain(folder: Path, cache: Path, steps: int, micro_batch: int = MICRO_BATCH) -> Program:
    """Return the plain loop as a program."""
    folder.mkdir(exist_ok=True)
    lines = folder / "plain.lines"
    command = [
        sys.executable,
        __file__,
        "--plain",
        str(next(cache.iterdir())),
        str(lines),
        f"--steps={steps}",
        f"--micro-batch={micro_batch}",
    ]
    return Program("plain loop", command, lines, folder / "plain.log")


def seconds_of(command: list[str], compiled: Path) -> float:
    """Return the wall time of a complete run that compiles into an empty cache."""
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": f"{compiled}/whole"}
    began = time.perf_counter()
    subprocess.run(command, check=True, env=env, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


def plain_loop(tokens_folder: Path, lines: Path, steps: int, micro_batch: int) -> None:
    """Train with a loop as one writes it by hand: a model, an optimizer, a schedule."""
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
    accumulate = GLOBAL_BATCH // micro_batch
    with lines.open("w", buffering=1) as log:
        for _ in range(steps):
            for _ in range(accumulate):
                begins = rng.integers(0, len(tokens) - SEQ_LEN, micro_batch)
                batch = torch.stack(
                    [torch.from_numpy(tokens[b : b + SEQ_LEN].astype(np.int64)) for b in begins]
                )
                loss = model(input_ids=batch, labels=batch).loss / accumulate
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            log.write(f"{loss.item()}\n")


if __name__ == "__main__":
    main()
