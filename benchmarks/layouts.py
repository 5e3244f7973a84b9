"""Tokens/s, MFU and peak memory of one model with several parallel layouts of the same GPUs and the same
global batch, measured with the real trainer.

    python benchmarks/layouts.py train_configs/llama3_8b.toml --ngpu 8 --training.seq_len=32768
        --training.global_batch_size=16 --output benchmarks/results/NAME.json
        [--cases shard,tensor2,...] [--section.key=value ...]

The degrees that a layout does not set are filled by FSDP. Data and tokenizer are the shipped ones, as in
throughput.py. The first step is not counted.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.environment import write_result  # noqa: E402
from benchmarks.throughput import MFU, RESERVED, TPS, measure, medians  # noqa: E402

PIPELINE = "--parallelism.pipeline_parallel_degree=2"
INTERLEAVED = "--parallelism.pipeline_parallel_schedule=Interleaved1F1B"
EACH = "--parallelism.fsdp_reduce=micro_batch"
CASES = {
    "shard": [EACH],
    "tensor2": ["--parallelism.tensor_parallel_degree=2", EACH],
    "context2": ["--parallelism.context_parallel_degree=2", EACH],
    "context4": ["--parallelism.context_parallel_degree=4", EACH],
    "context8": ["--parallelism.context_parallel_degree=8", EACH],
    "pipeline2": [PIPELINE],
    "pipeline2 interleaved": [PIPELINE, INTERLEAVED],
}


def main() -> None:
    """Run the cases, print and write the table. A failed layout is reported in the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config")
    parser.add_argument("--ngpu", type=int, required=True)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--skip", type=int, default=1)
    parser.add_argument("--cases", default="shard,tensor2,context2,pipeline2")
    parser.add_argument("--output", type=Path, required=True)
    options, overrides = parser.parse_known_args()
    layouts = []
    for name in options.cases.split(","):
        try:
            run = measure(
                options, ["--metrics.log_freq=1", "--lr_scheduler.warmup_steps=1", *overrides, *CASES[name]]
            )
        except Exception as e:
            layouts.append({"layout": name, "error": f"{type(e).__name__}: {e}"})
            print(f"{name:22} failed", flush=True)
            continue
        result = medians([run], "titanlite")
        print(
            f"{name:22} {result[TPS]:8,.0f} tokens/s per GPU   MFU {result.get(MFU, float('nan')):.1%}   "
            f"{result[RESERVED]:5.1f} GiB",
            flush=True,
        )
        layouts.append({"layout": name, "medians": result, **run})
    output = {
        "config": Path(options.config).name,
        "ngpu": options.ngpu,
        "overrides": overrides,
        "layouts": layouts,
    }
    write_result(options.output, output, "torch")


if __name__ == "__main__":
    main()
