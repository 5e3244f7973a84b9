"""Draws the README's picture: the debug run without interruption, and the same run stopped and resumed on
other numbers of ranks.

    python benchmarks/resume_curve.py          # about five minutes on two cores; writes benchmarks/results/
    and assets/

The metrics.jsonl of both runs are kept unchanged. The script fails if the sequences of any step
(`data/batch_sha`) differ.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
LOSS = "train/loss"


def run(folder: Path, ngpu: int, steps: int) -> list[dict]:
    """Train the debug job in `folder` up to `steps` on `ngpu` ranks. Returns the metrics of all steps."""
    command = [
        str(ROOT / "run_train.sh"),
        "debug",
        f"--job.dump_folder={folder}",
        f"--training.steps={steps}",
        "--lr_scheduler.total_steps=160",
        "--metrics.log_freq=1",
        "--metrics.sinks=[]",
    ]
    environment = os.environ | {"NGPU": str(ngpu), "PYTHON": sys.executable}
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    """Run both, compare and write the metrics, and draw the picture."""
    with tempfile.TemporaryDirectory() as temporary:
        whole = run(Path(temporary) / "whole", 1, 160)
        hops: list[dict] = []
        for ngpu, steps in ((1, 50), (2, 110), (1, 160)):
            hops = run(Path(temporary) / "hops", ngpu, steps)
    assert [row["data/batch_sha"] for row in hops] == [row["data/batch_sha"] for row in whole]
    difference = max(abs(a[LOSS] - b[LOSS]) for a, b in zip(whole, hops))
    print(f"equal sequences at all {len(whole)} steps; losses differ by at most {difference:.2e}")
    environment = {"torch": torch.__version__, "machine": platform.machine(), "cores": os.cpu_count()}
    result = {"env": environment, "largest_loss_difference": difference, "whole": whole, "hops": hops}
    (RESULTS / "resume_curve.json").write_text(json.dumps(result) + "\n")
    draw(whole, hops, ROOT / "assets/loss_curve.png")


def draw(whole: list[dict], hops: list[dict], path: Path) -> None:
    """Draw both loss curves over the steps, and the validation losses."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 3.6), dpi=120)
    steps = [row["step"] for row in whole]
    axes.plot(steps, [row[LOSS] for row in whole], color="#bbbbbb", linewidth=4, label="one run, 1 rank")
    for begin, end, ranks, color in (
        (1, 50, 1, "#1f77b4"),
        (50, 110, 2, "#d62728"),
        (110, 160, 1, "#2ca02c"),
    ):
        segment = [report for report in hops if begin <= report["step"] <= end]
        label = f"{'started' if begin == 1 else 'resumed'} on {ranks} rank{'s' if ranks > 1 else ''}"
        points = [r["step"] for r in segment], [r[LOSS] for r in segment]
        axes.plot(*points, color=color, linewidth=1.2, label=label)
    validated = [row for row in whole if "eval/loss" in row]
    axes.plot(
        [r["step"] for r in validated],
        [r["eval/loss"] for r in validated],
        "ko",
        markersize=4,
        label="validation",
    )
    axes.set(xlabel="step", ylabel="loss (nats per token)", title="train_configs/debug.toml on two CPU cores")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
