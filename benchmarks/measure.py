"""Step times: planned by default, planned after `titanlite tune --measure`, and of real runs, on one GPU.

    python benchmarks/measure.py --output benchmarks/results/NAME.json [--cases llama3_1b,...]

For each case, the machine is measured for the job and the job is then trained for some steps on the shipped
data. The times are written after each case. `measure_s`: wall time of `titanlite tune --measure`, which
includes starting Python and compiling."""

from __future__ import annotations

import argparse
import json
import statistics
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
from benchmarks.throughput import measure  # noqa: E402
from titanlite.job import load_job  # noqa: E402
from titanlite.lab.calibration import read_measurement  # noqa: E402
from titanlite.lab.cards import Cluster  # noqa: E402
from titanlite.lab.layouts import assess  # noqa: E402
from titanlite.lab.planned import planned_run  # noqa: E402
from titanlite.lab.step_time import guesses  # noqa: E402
from titanlite.table import table  # noqa: E402

OF_125M = [
    "--model.flavor=125M", "--training.seq_len=1024", "--training.local_batch_size=32",
    "--training.global_batch_size=64",
]  # fmt: skip
CASES = {
    "llama3_1b": [
        "llama3_1b.toml", "--compile.enable", "--training.local_batch_size=16",
        "--training.global_batch_size=32",
    ],
    "125m": ["llama3_1b.toml", "--compile.enable", *OF_125M],
    "llama3_8b_6layers": [
        "llama3_8b.toml", "--compile.enable", "--model.overrides.n_layers=6", "--training.local_batch_size=1",
        "--training.global_batch_size=2",
    ],
    "125m_not_compiled": ["llama3_1b.toml", "--no-compile.enable", *OF_125M],
    "debug": ["debug.toml"],
}  # fmt: skip
STEP = "time/step_s"


def run(case: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the machine for a case, train it, and compare."""
    config, *overrides = CASES[case]
    path, file = ROOT / "train_configs" / config, folder / f"{case}.json"
    command = [sys.executable, "-m", "titanlite.cli", "tune", str(path), "--measure", f"--output={file}"]
    began = time.perf_counter()
    printed = subprocess.run([*command, *overrides], check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    measure_s = time.perf_counter() - began
    measurement, job = read_measurement(file), load_job(path, overrides, None)
    default = Cluster(measurement.card, 1, 1)
    planned = planned_run(job, default)
    times = [assess(planned, cluster).time
             for cluster in (default, default._replace(speeds=measurement.speeds))]  # fmt: skip
    settings = argparse.Namespace(config=str(path), ngpu=1, steps=options.steps, skip=options.skip)
    real = measure(settings, overrides, folder=folder / case)
    step_s = statistics.median(report[STEP] for report in real["counted"])
    return {
        "case": case,
        "overrides": overrides,
        "measure_s": round(measure_s, 1),
        "train_s": round(real["wall_s"], 1),
        "is_guess": bool(guesses(planned)),
        "planned_s": times[0].seconds,
        "calibrated_s": times[1].seconds,
        "measured_s": step_s,
        "planned_error": times[0].seconds / step_s - 1,
        "calibrated_error": times[1].seconds / step_s - 1,
        "printed": printed.stdout.partition("\n\nwritten: ")[0],
        "measurement": json.loads(file.read_text()) | {"config": config},
        "reports": real["reports"],
        "env": real["env"],
    }


def text(rows: list[dict[str, Any]]) -> str:
    """The cases as a table."""
    lines = [["case", "planned s", "error", "calibrated s", "error", "measured s"]]
    for row in rows:
        planned, calibrated = (
            [f"{row[f'{name}_s']:.4f}", f"{row[f'{name}_error']:+.1%}"] for name in ("planned", "calibrated")
        )
        lines.append([row["case"], *planned, *calibrated, f"{row['measured_s']:.4f}"])
    return table(lines, num_texts=1)


def main() -> None:
    """Run the cases, print and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default="llama3_1b,125m,llama3_8b_6layers,125m_not_compiled")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--skip", type=int, default=10)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for case in options.cases.split(","):
            rows.append(run(case, Path(folder), options))
            print(rows[-1]["printed"], f"\n\n{text(rows)}\n", flush=True)
            write_result(options.output, {"rows": rows}, "torch", "torchao")


if __name__ == "__main__":
    main()
