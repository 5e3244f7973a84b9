"""Peak memory per step when the vocabulary doubles, with the chunked loss and with all logits in memory,
measured with the real trainer.

    python benchmarks/memory.py train_configs/llama3_1b.toml --output benchmarks/results/NAME.json
        [--devices 0,1] [--section.key=value ...]

A larger vocabulary also has larger weights. So the table has the peak, and the peak minus weights and
optimizer state, which depends on the loss.
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

from benchmarks.devices import on_devices  # noqa: E402
from benchmarks.environment import write_result  # noqa: E402
from benchmarks.throughput import measure  # noqa: E402
from titanlite.job import load_job  # noqa: E402

LOSSES = ("chunked_cross_entropy", "cross_entropy")
PEAK = "memory/peak_allocated_gib"
STATE_BYTES = 12  # per parameter: the weight and AdamW's two moments, in fp32


def main() -> None:
    """Run the cases, print and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--devices", default="0", help="devices to use, one case at a time per device")
    parser.add_argument("--output", type=Path, required=True)
    options, overrides = parser.parse_known_args()
    options.ngpu, options.skip = 1, 0
    vocabulary = load_job(Path(options.config), overrides, world_size=None).model.config.vocab_size

    def one(device: str, case: tuple[str, int]) -> dict[str, Any]:
        loss, vocab_size = case
        chosen = [
            *overrides,
            "--lr_scheduler.warmup_steps=1",
            f"--loss.name={loss}",
            f"--model.overrides.vocab_size={vocab_size}",
        ]
        run = measure(options, chosen, device)
        peak = max(report[PEAK] for report in run["reports"])
        beyond = peak - STATE_BYTES * parameters(options.config, chosen) / 2**30
        print(f"{loss:22} {vocab_size:7} ids: {peak:.2f} GiB, {beyond:.2f} beyond the state", flush=True)
        return {"loss": loss, "vocab_size": vocab_size, "peak_gib": peak, "beyond_state_gib": beyond, **run}

    cases = on_devices(
        options.devices.split(","), [(loss, n * vocabulary) for loss in LOSSES for n in (1, 2)], one
    )
    growth = {
        small["loss"]: {key: large[key] / small[key] - 1 for key in ("peak_gib", "beyond_state_gib")}
        for small, large in zip(cases[::2], cases[1::2])
    }
    print(json.dumps(growth))
    output = {
        "config": Path(options.config).name,
        "overrides": overrides,
        "growth": growth,
        "cases": cases,
    }
    write_result(options.output, output, "torch")


def parameters(config: str, overrides: list[str]) -> int:
    """Return the number of the model's parameters."""
    import torch

    with torch.device("meta"):
        net = load_job(Path(config), overrides, world_size=None).model.build()
    return sum(p.numel() for p in net.parameters())


if __name__ == "__main__":
    main()
