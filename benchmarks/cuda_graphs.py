"""Speed of a small model with and without CUDA graphs, by the number of sequences per micro-batch: the real
trainer on one GPU.

    python benchmarks/cuda_graphs.py --output benchmarks/results/cuda_graphs_h200.json

The model is Llama 125M with an untied head and a vocabulary of 128,256, sequences of 2048 tokens. Each case
has the median tokens/s after the first ten steps, and the raw reports.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.environment import write_result  # noqa: E402
from benchmarks.throughput import RESERVED, TPS, measure, medians  # noqa: E402

MODEL = [
    "--model.overrides.vocab_size=128256",
    "--model.overrides.tie_word_embeddings=false",
    "--training.seq_len=2048",
    "--training.global_batch_size=-1",
    "--metrics.detail_freq=0",
]


def main() -> None:
    """Run all cases and write the result after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    options.config, options.ngpu, options.skip = "train_configs/llama3_125m.toml", 1, 10
    cases: list[dict[str, Any]] = []
    for sequences, compiled in ((2, True), (2, False), (16, True)):
        for graphs in (False, True):
            case = {"sequences": sequences, "compiled": compiled, "cuda_graphs": graphs}
            keys = {"training.local_batch_size": sequences, "compile.enable": compiled}
            keys |= {"compile.cuda_graphs": graphs}
            run = measure(options, [*MODEL, *(f"--{key}={str(keys[key]).lower()}" for key in keys)])
            summary = medians([run], "titanlite")
            cases.append({**case, TPS: summary[TPS], RESERVED: summary[RESERVED], "run": run})
            print(json.dumps({**case, TPS: summary[TPS], RESERVED: summary[RESERVED]}), flush=True)
            write_result(options.output, {"overrides": MODEL, "cases": cases}, "torch")


if __name__ == "__main__":
    main()
