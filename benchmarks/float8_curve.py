"""Float8 against bf16 on real text: the losses of the same run with each recipe, and of bf16 once more with
another kernel for attention, whose other rounding says how much a difference means.

    python benchmarks/float8_curve.py train_configs/llama3_125m.toml --output benchmarks/results/NAME.json
        --picture assets/float8_curve.png [--steps 600] [--devices 0,1] [--section.key=value ...]

The text is the standard library's source under the shipped tokenizer, as in throughput.py; the last rows are
held out for validation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.devices import on_devices  # noqa: E402
from benchmarks.environment import write_result  # noqa: E402
from benchmarks.throughput import measure  # noqa: E402

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
CASES = {
    "bf16": [],
    "bf16, other rounding": ["--attention.sdpa_kernel=flash"],
    **{f"float8 {recipe}": ["--float8.enable", f"--float8.recipe={recipe}"] for recipe in RECIPES},
}
LOSS = "train/loss"


def main() -> None:
    """Run the cases, write and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--devices", default="0", help="devices to run on, one case at a time on each")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--picture", type=Path)
    options, overrides = parser.parse_known_args()
    options.ngpu, options.skip = 1, options.steps // 2
    common = [
        "--compile.enable",
        "--data.holdout_sequences=128",
        "--validation.enable=true",
        f"--validation.freq={options.steps}",
        f"--lr_scheduler.warmup_steps={options.steps // 4}",
        *overrides,
    ]
    names = list(CASES)
    runs = on_devices(
        options.devices.split(","), names, lambda device, name: measure(options, common + CASES[name], device)
    )
    curves = {name: run["reports"] for name, run in zip(names, runs)}
    summary = {name: summarise(rows, curves["bf16"]) for name, rows in curves.items()}
    print(json.dumps(summary, indent=1))
    output = {
        "config": Path(options.config).name,
        "overrides": overrides,
        "summary": summary,
        "curves": curves,
        "env": runs[0]["env"],
    }
    write_result(options.output, output, "torch", "torchao")
    if options.picture is not None:
        draw(output, options.picture)


def summarise(rows: list[dict[str, Any]], reference: list[dict[str, Any]]) -> dict[str, float]:
    """The validation loss at the end, and the mean difference of the training loss to `reference` over the
    last half; each step has the same rows."""
    pairs = list(zip(rows, reference))[len(rows) // 2 :]
    return {
        "eval/loss": rows[-1]["eval/loss"],
        "mean_difference": statistics.mean(a[LOSS] - b[LOSS] for a, b in pairs),
        "largest_difference": max(abs(a[LOSS] - b[LOSS]) for a, b in pairs),
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """The curves, and their differences to bf16's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 5), dpi=120, sharex=True, height_ratios=[2, 1])
    reference = [row[LOSS] for row in result["curves"]["bf16"]]
    for name, rows in result["curves"].items():
        steps = [row["step"] for row in rows]
        style = {"color": "#999999"} if "rounding" in name else {}
        above.plot(steps, [row[LOSS] for row in rows], label=name, linewidth=1, **style)
        if name != "bf16":
            difference = [row[LOSS] - wanted for row, wanted in zip(rows, reference)]
            below.plot(steps, difference, linewidth=1, **(style or {"color": above.lines[-1].get_color()}))
    above.set(ylabel="loss (nats a token)", title=f"{result['config']}, float8 and bf16")
    above.legend(frameon=False)
    below.set(xlabel="step", ylabel="minus bf16's", ylim=(-0.1, 0.1))
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
