"""Time of AdamW's step on one GPU: torch's fused implementation and titanlite's, by dtype of the state.

    python benchmarks/adamw_update.py --output benchmarks/results/adamw_update_h200.json [--steps 10]

The parameters have the shapes of three models. A step's time is the median over --steps steps, each measured
by events on the device, after three that do not count; as in training, gradients are divided by a scalar on
the device. GB/s: of the weights, gradients and moments that a step has to read and write at least; torch's
fused implementation also writes the divided gradients. `inductor's rounding`: the 8-bit update compiled with
FMA and approximate division, whose last bits depend on the kernel's block size.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.environment import write_result  # noqa: E402
from titanlite.job import load_job  # noqa: E402
from titanlite.optim import low_bit  # noqa: E402
from titanlite.optim.base import guarded_step  # noqa: E402

MODELS = {
    "llama3_1b": ["llama3_1b.toml"],
    "qwen3_30b_a3b of 4 blocks": ["qwen3_30b_a3b.toml", "--model.overrides.n_layers=4"],
    "qwen3_30m": ["qwen3_30m.toml"],
}
BYTES = {"float32": 28, "bfloat16": 20, "int8": 16.25}  # per parameter: read weight, gradient, state; write
OPTIMIZERS: dict[str, tuple[str, Callable[..., torch.optim.Optimizer]]] = {
    "torch fused": ("float32", partial(torch.optim.AdamW, fused=True, eps=1e-8)),
    **{kind: (kind, partial(low_bit.CompiledAdamW, state_dtype=kind, eps=1e-8)) for kind in BYTES},
    "int8, inductor's rounding": ("int8", partial(low_bit.CompiledAdamW, state_dtype="int8", eps=1e-8)),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    exact, rows = low_bit._compiled_update, []
    for model, (config, *overrides) in MODELS.items():
        job = load_job(ROOT / "train_configs" / config, overrides, None)
        shapes = [p.shape for p in job.model.build_on_meta().parameters()]
        for name, (state_dtype, build) in OPTIMIZERS.items():
            low_bit._compiled_update = own_rounding if "rounding" in name else exact
            seconds = step_time(shapes, build, options.steps)
            num_values = sum(shape.numel() for shape in shapes)
            rate = num_values * BYTES[state_dtype] / seconds / 1e9
            row = {"model": model, "parameters": num_values, "optimizer": name}
            rows.append({**row, "step_ms": round(seconds * 1e3, 3), "gb_per_s": round(rate)})
            print(json.dumps(rows[-1]), flush=True)
            result = {"device": torch.cuda.get_device_name(), "steps": options.steps, "rows": rows}
            write_result(options.output, result, "torch", "titanlite")


@cache
def own_rounding() -> Callable[..., None]:
    return torch.compile(low_bit._update, fullgraph=True)


def step_time(shapes: list[torch.Size], build: Callable[..., torch.optim.Optimizer], steps: int) -> float:
    """Median seconds of a step."""
    params = [torch.nn.Parameter(torch.randn(shape, device="cuda")) for shape in shapes]
    optimizer = build([{"params": params, "lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95)}])
    for p in params:
        p.grad = torch.randn_like(p)
    apply, divisor = torch.ones((), dtype=torch.bool, device="cuda"), torch.ones((), device="cuda")
    times = []
    for _ in range(steps + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        guarded_step(optimizer, apply, divisor)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[3:])


if __name__ == "__main__":
    main()
