"""Loss curves of float8 and bf16 on real text: the same run with each float8 recipe and with bf16. Another
bf16 run with a different attention kernel shows how large differences from rounding alone are.

    python benchmarks/float8_curve.py train_configs/llama3_125m.toml --output benchmarks/results/NAME.json
        --picture assets/float8_curve.png [--steps 600] [--devices 0,1] [--section.key=value ...]

The text is the standard library's source with the shipped tokenizer, as in throughput.py; the last sequences
are held out for validation.
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
    """Run the cases, write the results and draw the curves."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--devices", default="0", help="devices to use, one case at a time per device")
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
    summary = {name: summarise(reports, curves["bf16"]) for name, reports in curves.items()}
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


def summarise(reports: list[dict[str, Any]], reference: list[dict[str, Any]]) -> dict[str, float]:
    """Return the final validation loss, and the mean difference of the training loss to `reference` over the
    last half of the steps. All runs have the same sequences at each step."""
    pairs = list(zip(reports, reference))[len(reports) // 2 :]
    return {
        "eval/loss": reports[-1]["eval/loss"],
        "mean_difference": statistics.mean(a[LOSS] - b[LOSS] for a, b in pairs),
        "largest_difference": max(abs(a[LOSS] - b[LOSS]) for a, b in pairs),
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the loss curves and their differences to the bf16 curve."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 5), dpi=120, sharex=True, height_ratios=[2, 1])
    reference = [report[LOSS] for report in result["curves"]["bf16"]]
    for name, reports in result["curves"].items():
        steps = [report["step"] for report in reports]
        style = {"color": "#999999"} if "rounding" in name else {}
        above.plot(steps, [report[LOSS] for report in reports], label=name, linewidth=1, **style)
        if name != "bf16":
            difference = [report[LOSS] - loss for report, loss in zip(reports, reference)]
            below.plot(steps, difference, linewidth=1, **(style or {"color": above.lines[-1].get_color()}))
    above.set(ylabel="loss (nats per token)", title=f"{result['config']}, float8 and bf16")
    above.legend(frameon=False)
    below.set(xlabel="step", ylabel="minus bf16's", ylim=(-0.1, 0.1))
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
