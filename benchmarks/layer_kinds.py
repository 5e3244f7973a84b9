"""What layers of different kinds cost on one GPU, measured with the real trainer:

    python benchmarks/layer_kinds.py windows --output benchmarks/results/windows_GPU.json
    python benchmarks/layer_kinds.py delta --output benchmarks/results/gated_delta_net_GPU.json

windows  Gemma 3 1B with sequences of 32,768 tokens: windows of 1,024 tokens in five layers of six, beside
         full attention in all layers
delta    Qwen3.5 0.8B with sequences of 8,192 and of 65,536 tokens beside plain_delta_net.py, a plain loop
         around flash-linear-attention's own layer, of the same shape and batch

The runs are made in turns. With `--ngpu`, windows shares each sequence by context parallel over these GPUs.
Another `--config` tries the program: with `--config=debug --seq-len 256`, `windows` runs on a CPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.environment import write_result  # noqa: E402
from benchmarks.throughput import RESERVED, TPS, measure, medians  # noqa: E402

WINDOWS = {
    "windows": '{layer_pattern="SSSSSL",sliding_window=1024}',
    "full": '{layer_pattern="L",sliding_window=0}',
}
LENGTHS = {8192: (4, False), 65_536: (1, True)}  # sequences in a batch, and whether blocks are checkpointed


def windows(options: argparse.Namespace) -> dict[str, Any]:
    """Both kinds of model, in turns. Returns medians, their ratio and the raw reports."""
    options.config = options.config or "gemma3_1b"
    overrides = batch_of(1, options.seq_len or 32_768)
    overrides.append(f"--parallelism.context_parallel_degree={options.ngpu}")
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in WINDOWS}
    for _ in range(options.rounds):
        for name, fields in WINDOWS.items():
            runs[name].append(measure(options, [*overrides, f"--model.overrides={fields}"]))
            print(json.dumps({"model": name, **medians(runs[name][-1:], "titanlite")}), flush=True)
    shown = {name: medians(done, "titanlite") for name, done in runs.items()}
    ratio = shown["windows"][TPS] / shown["full"][TPS]
    return {"overrides": overrides, "medians": shown, "ratio": ratio, "runs": runs}


def delta(options: argparse.Namespace) -> dict[str, Any]:
    """titanlite and the plain loop, in turns, for each length. Returns medians, ratios, raw reports."""
    options.config = options.config or "qwen3_5_0_8b"
    result = {}
    for seq_len in [options.seq_len] if options.seq_len else LENGTHS:
        batch, is_checkpointed = LENGTHS[seq_len]
        ours, theirs = list[dict[str, Any]](), list[dict[str, Any]]()
        keys = batch_of(batch, seq_len)
        keys.append(f"--activation_checkpoint.mode={'full' if is_checkpointed else 'none'}")
        for _ in range(options.rounds):
            theirs.append(plain(options, batch, seq_len, is_checkpointed))
            ours.append(measure(options, keys))
        shown = medians(ours, "titanlite")
        speeds, memory = ([run[key] for run in theirs] for key in ("tokens_per_s", "peak_reserved_gib"))
        ratios = {"tokens/s": shown[TPS] / max(speeds), "memory": shown[RESERVED] / min(memory)}
        print(
            json.dumps({"seq_len": seq_len, **shown, "plain": [speeds, memory], "ratios": ratios}), flush=True
        )
        result[str(seq_len)] = {"medians": shown, "ratios": ratios, "runs": ours, "plain": theirs}
    return result


def batch_of(batch: int, seq_len: int) -> list[str]:
    return [
        f"--training.seq_len={seq_len}", f"--training.local_batch_size={batch}",
        f"--training.global_batch_size={batch}", "--data.packing=chunk",
    ]  # fmt: skip


def plain(options: argparse.Namespace, batch: int, seq_len: int, is_checkpointed: bool) -> dict[str, Any]:
    """Run the plain loop. Returns what it printed last."""
    command = [
        sys.executable, str(ROOT / "benchmarks/plain_delta_net.py"), f"--seq-len={seq_len}",
        f"--batch={batch}", f"--steps={options.steps}", f"--skip={options.skip}",
        *["--checkpoint-blocks"] * is_checkpointed,
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{command[1]} ended with {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps({"plain": seq_len, "tokens/s": result["tokens_per_s"]}), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("windows", "delta"))
    parser.add_argument("--config", help="instead of the configuration that is measured")
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--skip", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--ngpu", type=int, default=1)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    result = windows(options) if options.part == "windows" else delta(options)
    packages = ("torch", "triton", "fla-core", "flash-linear-attention", "tilelang")
    write_result(options.output, {"config": options.config, **result}, *packages)


if __name__ == "__main__":
    main()
