"""Peak memory and speed of training adapters (LoRA) and of training all weights, measured with the real
trainer from the same initial weights.

    python benchmarks/lora_memory.py train_configs/llama3_8b.toml [--folder FOLDER] [--section.key=value ...]
    python benchmarks/lora_memory.py            # rewrites docs/finetuning.md

The initial weights are random. They are written once, in bfloat16, as a Hugging Face directory in FOLDER,
which should be on a fast disk or in memory. Nothing is compiled, because the runs take a few steps only.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.environment import write_result  # noqa: E402
from benchmarks.optimizer_tables import paragraph, table, with_tables  # noqa: E402
from benchmarks.throughput import RESERVED, SHIPPED_DATA, TPS, measure, medians  # noqa: E402
from titanlite.interop.export import ExportFormat, write_directory  # noqa: E402
from titanlite.interop.weights import Chunk, LazyTensor, ModelAndTokenizer, Region, Weights  # noqa: E402
from titanlite.job import Job, load_job  # noqa: E402

PAGE, RESULT = ROOT / "docs/finetuning.md", ROOT / "benchmarks/results/lora_memory_h200.json"
ALLOCATED = "memory/peak_allocated_gib"
SETTINGS = [
    "--training.seq_len=4096",
    "--training.local_batch_size=1",
    "--training.global_batch_size=1",
    "--no-compile.enable",
    "--metrics.log_freq=2",
    "--lr_scheduler.warmup_steps=1",
]
CASES = {"adapters": ["--lora.enable"], "all weights": list[str]()}


def main() -> None:
    """Measure the cases and record them, or write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="?")
    parser.add_argument("--folder", type=Path, help="default: a temporary one")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--skip", type=int, default=4, help="steps before the first report that counts")
    parser.add_argument("--output", type=Path, default=RESULT)
    options, overrides = parser.parse_known_args()
    options.ngpu = 1
    if options.config is None:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(refreshed(page, json.loads(options.output.read_text())), encoding="utf-8")
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        base = Path(folder, "base")
        settings = [*SETTINGS, *overrides]
        began = time.perf_counter()
        # In a process of its own, whose memory on the device is free afterwards.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            size = pool.submit(write_base, options.config, settings, base).result()
        print(f"{size / 2**30:.1f} GiB of weights in {time.perf_counter() - began:.1f} s", flush=True)
        settings.append(f"--checkpoint.initial_load_path={base}")
        result: dict[str, Any] = {"config": Path(options.config).name, "overrides": [*SETTINGS, *overrides]}
        for name, chosen in CASES.items():
            case = one(options, [*settings, *chosen], Path(folder, name.replace(" ", "_")))
            result |= {"cases": result.get("cases", {}) | {name: case}}
            write_result(options.output, result, "torch")  # after each: the next may take too long


def one(options: argparse.Namespace, overrides: list[str], folder: Path) -> dict[str, Any]:
    """Run one case."""
    job = load_job(Path(options.config), [*SHIPPED_DATA, *overrides], world_size=None)
    parameters = list(job.build_on_meta().parameters())
    about = {
        "parameters": sum(p.numel() for p in parameters),
        "trained": sum(p.numel() for p in parameters if p.requires_grad),
        "rank": job.lora.rank if job.lora.enable else 0,
        "tokens_per_step": job.training.seq_len * job.training.global_batch_size,
        "activation_checkpoint": job.activation_checkpoint.mode,
    }
    try:
        run = measure(options, overrides, folder=folder)
    except subprocess.CalledProcessError as e:
        lines = (folder / "log.txt").read_text().splitlines()
        reason = next(
            (line for line in reversed(lines) if "out of memory" in line), lines[-1] if lines else ""
        )
        print(*lines[-30:], sep="\n", flush=True)
        return {**about, "error": f"exit code {e.returncode}: {reason}"}
    middle = medians([run], "titanlite")
    print(json.dumps({**about, **middle, "wall_s": run["wall_s"]}), flush=True)
    return {**about, "medians": middle, **run}


def write_base(config: str, overrides: Sequence[str], target: Path) -> int:
    """Write random weights of the configuration's model, in bfloat16. Returns their size in bytes."""
    import torch

    from titanlite.checkpoint.state import model_tensors
    from titanlite.parallel.initialize import fill_normal
    from titanlite.runtime.process import pick_device

    job: Job = load_job(Path(config), [*SHIPPED_DATA, *overrides], world_size=None)
    net, device = job.model.build_on_meta(), pick_device()

    def lazy(name: str, shape: torch.Size) -> LazyTensor:
        def load(region: Region) -> torch.Tensor:
            values = torch.empty(shape, dtype=torch.bfloat16, device=device)
            fill_normal(values, name, *net.init_normal(name), seed=0)
            return values[region].cpu()

        return LazyTensor(
            tuple(shape), torch.bfloat16, target, [Chunk((0,) * len(shape), tuple(shape), load)]
        )

    tensors = {name: lazy(name, tensor.shape) for name, tensor in model_tensors(net).items()}
    weights = Weights(target, "random", tensors, job.model.config.architecture_fields())
    model = ModelAndTokenizer(job.model, job.tokenizer.build())
    return write_directory(weights, target, model, ExportFormat(keep_padding=True))


def refreshed(page: str, result: dict[str, Any] | None) -> str:
    """The page with the table of the result; None: of no result."""
    return with_tables(page, {"lora_memory": lora_memory}, result)


def lora_memory(result: dict[str, Any]) -> str:
    """Memory and speed of the cases."""
    cases = result["cases"]
    rows, env = [], {}
    for name in sorted(cases, reverse=True):
        case = cases[name]
        env = case.get("env", env)
        words = f"{name} of rank {case['rank']}" if case["rank"] else name
        numbers = ["fails: " + case["error"], "", ""] if "error" in case else measured(case["medians"])
        rows.append([words, f"{case['trained'] / 1e6:,.1f} million", *numbers])
    head = ["trained", "parameters trained", "peak allocated", "peak reserved", "tokens/s"]
    case = cases["adapters"]
    num_frozen = case["parameters"] - case["trained"]
    words = paragraph(
        f"`{result['config']}` ({num_frozen / 1e9:.2f} billion parameters, random weights) on one",
        f"{env['device']} with torch {env['torch']}: {case['tokens_per_step']:,} tokens per step, activation",
        f"checkpointing {case['activation_checkpoint']}, not compiled (`{RESULT.name}`).",
        "Frozen weights are in float32, too.",
    )
    return f"{table(head, rows)}\n{words}\n"


def measured(middle: dict[str, float]) -> list[str]:
    """The cells of a case's measurements."""
    return [f"{middle[ALLOCATED]:.1f} GiB", f"{middle[RESERVED]:.1f} GiB", f"{middle[TPS]:,.0f}"]


if __name__ == "__main__":
    main()
