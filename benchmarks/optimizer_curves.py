"""Do other optimizers train better? Runs of optimizer_curves.toml on real text with AdamW and Muon.

    python benchmarks/optimizer_curves.py --output benchmarks/results/optimizer_curves_h200.json
        [--resume FILE.json] [--devices 0,1] [--budget-s 480] [--rates muon=2e-3,4e-3,8e-3]
        [--section.key=value ...]
    python benchmarks/optimizer_curves.py --output FILE.json --folders outputs/optimizer_curves
    python benchmarks/optimizer_curves.py --output FILE.json --picture assets/optimizer_curves.png

First each optimizer runs at three peak learning rates. If the best one, by final validation loss, is the
lowest or the highest, the next rate in that direction follows (`--more-rates`). Then the best rate of each
runs with another seed, which changes the initial weights and the order of the data; and AdamW's best rate
with its state in 8 bits and in bfloat16.

The output is written after each run. With `--resume`, runs in that file are not repeated; no run starts after
`--budget-s`. One run at a time per device: several at once on one GPU would spoil the times. `--folders`
writes the recorded runs as run folders, for `titanlite report`; `--picture` draws them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from itertools import accumulate, pairwise, starmap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.devices import on_devices  # noqa: E402
from benchmarks.environment import without_paths, write_result  # noqa: E402
from benchmarks.package_text import FOLDER, MEGABYTES, package_text  # noqa: E402
from benchmarks.throughput import TPS, measure  # noqa: E402

CONFIG = ROOT / "benchmarks/optimizer_curves.toml"
RUNS = ROOT / "outputs/optimizer_curves"
RATES = {"adamw": (1.5e-3, 3e-3, 6e-3), "muon": (1.5e-3, 3e-3, 6e-3)}
KEYS = {name: [f"--optimizer.name={name}"] for name in RATES}
VARIANTS = {f"adamw {dtype}": [f"--optimizer.state_dtype={dtype}"] for dtype in ("int8", "bfloat16")}
SECOND_SEED = 1
LOSS, VALIDATION = "train/loss", "eval/loss"
RECORDED = ("events.jsonl", "job.toml", "sources.json")  # files of a run folder, beside metrics and env


@dataclass(frozen=True)
class Case:
    """One run: an optimizer, or a variant of one, with its peak learning rate and the seed."""

    optimizer: str
    lr: float
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.optimizer.replace(' ', '_')}_lr{self.lr:g}_seed{self.seed}"

    @property
    def keys(self) -> list[str]:
        keys = KEYS[self.optimizer.split()[0]] + VARIANTS.get(self.optimizer, [])
        return [*keys, f"--optimizer.lr={self.lr:g}", f"--training.seed={self.seed}"]


class Recorder:
    """Runs cases that have no result yet, and writes the output after each of them."""

    def __init__(self, options: argparse.Namespace, overrides: list[str]):
        self.options, self.overrides, self.began = options, overrides, time.monotonic()
        self.lock = threading.Lock()
        self.text = package_text(ROOT / FOLDER, options.megabytes)
        self.runs: dict[str, dict[str, Any]] = {}
        if options.resume is not None:
            before = json.loads(options.resume.read_text())
            theirs = before["text"]["sha256"], before["steps"], before["overrides"]
            if theirs != (self.text["sha256"], options.steps, overrides):
                sys.exit(f"{options.resume}: runs on another text, with other steps or overrides")
            # Runs that failed are repeated.
            self.runs = {name: run for name, run in before["runs"].items() if "error" not in run}

    def run(self, cases: list[Case]) -> bool:
        """Run the cases, as many at a time as there are devices. Returns whether there was time for all."""
        waiting = [case for case in cases if case.name not in self.runs]
        on_devices(self.options.devices.split(","), waiting, self._run)
        missing = [case.name for case in cases if case.name not in self.runs]
        if missing:
            print(f"no time for {', '.join(missing)} and what follows them; continue with --resume")
        return not missing

    def _run(self, device: str, case: Case) -> None:
        if time.monotonic() - self.began > self.options.budget_s:
            return
        folder, began = RUNS / case.name, time.perf_counter()
        shutil.rmtree(folder, ignore_errors=True)
        about = {"optimizer": case.optimizer, "lr": case.lr, "seed": case.seed, "keys": case.keys}
        try:
            keys = [*self.overrides, *case.keys]
            run = measure(self.options, keys, device, folder=folder, data=[])
            result = about | recorded(folder, run) | {"wall_s": run["wall_s"]}
        except (subprocess.CalledProcessError, OSError, LookupError, ValueError) as e:
            error = without_paths((folder / "log.txt").read_text()[-2000:])
            seconds = time.perf_counter() - began
            result = about | {"error": f"{type(e).__name__}\n{error}", "wall_s": seconds}
        with self.lock:
            self.runs[case.name] = result | {"device": device}
            self.write()
        print(json.dumps({case.name: brief(result)}), flush=True)

    def best(self, optimizer: str) -> Case | None:
        """The case of the first seed with the lowest final validation loss; None before it is known."""
        cases = [Case(optimizer, lr) for lr in rates_of(self.runs, optimizer)]
        return min(cases, key=lambda case: self.runs[case.name]["final"][VALIDATION], default=None)

    def write(self) -> None:
        """Write what has been measured so far."""
        result = {
            "config": CONFIG.name,
            "steps": self.options.steps,
            "overrides": self.overrides,
            "text": self.text,
            "gpu_minutes": sum(run["wall_s"] for run in self.runs.values()) / 60,
            "summary": summary(self.runs),
            "runs": self.runs,
        }
        write_result(self.options.output, result, "torch", "torchao")


def main() -> None:
    """Run the cases, or use their results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--devices", default="0", help="devices to use, one run at a time per device")
    parser.add_argument("--budget-s", type=float, default=480)
    parser.add_argument("--rates", action="append", default=[], help="rates of one optimizer: muon=2e-3,4e-3")
    parser.add_argument("--more-rates", type=int, default=1, help="largest number of rates to add to those")
    parser.add_argument("--steps", type=int, default=640)
    parser.add_argument("--megabytes", type=int, default=MEGABYTES, help="largest amount of text to train on")
    parser.add_argument("--folders", type=Path, help="write the recorded runs as run folders here")
    parser.add_argument("--picture", type=Path, help="draw the recorded runs into this file")
    options, overrides = parser.parse_known_args()
    options.config, options.ngpu, options.skip = str(CONFIG), 1, options.steps // 10
    if options.folders is None and options.picture is None:
        rates = {**RATES, **dict(map(parse_rates, options.rates))}
        recorder = Recorder(options, overrides)
        run_all(recorder, rates, options.more_rates)
        recorder.write()
        return
    result = json.loads(options.output.read_text())
    if options.folders is not None:
        write_folders(result, options.folders)
    if options.picture is not None:
        draw(result, options.picture)


def parse_rates(text: str) -> tuple[str, tuple[float, ...]]:
    """Parse `NAME=RATE,RATE`."""
    name, _, rates = text.partition("=")
    if name not in RATES:
        sys.exit(f"--rates={text}: expected one of {', '.join(RATES)}, `=` and numbers")
    return name, tuple(map(float, rates.split(",")))


def run_all(recorder: Recorder, rates: dict[str, tuple[float, ...]], num_more_rates: int) -> None:
    """Run the rates, then what depends on the best of them."""
    cases = [Case(name, lr) for name, lrs in rates.items() for lr in lrs]
    for _ in range(num_more_rates + 1):
        if not recorder.run(cases):
            return
        cases = [Case(name, lr) for name in rates for lr in next_rates(recorder.runs, name)]
    best = [case for case in map(recorder.best, rates) if case is not None]
    second_seeds = [Case(case.optimizer, case.lr, SECOND_SEED) for case in best]
    variants = [Case(name, case.lr) for case in best if case.optimizer == "adamw" for name in VARIANTS]
    recorder.run([*second_seeds, *variants])


def rates_of(runs: dict[str, dict[str, Any]], optimizer: str) -> list[float]:
    """The rates at which an optimizer has been run with the first seed, in order."""
    return sorted(
        run["lr"]
        for run in runs.values()
        if run["optimizer"] == optimizer and run["seed"] == 0 and "final" in run
    )


def next_rates(runs: dict[str, dict[str, Any]], optimizer: str) -> list[float]:
    """The next rate beyond the best one, if that is the lowest or the highest of at least two."""
    rates = rates_of(runs, optimizer)
    losses = [runs[Case(optimizer, lr).name]["final"][VALIDATION] for lr in rates]
    if len(rates) < 2:
        return []
    if losses[0] == min(losses):
        return [float(f"{rates[0] ** 2 / rates[1]:.3g}")]
    return [float(f"{rates[-1] ** 2 / rates[-2]:.3g}")] if losses[-1] == min(losses) else []


def recorded(folder: Path, run: dict[str, Any]) -> dict[str, Any]:
    """The result of a run: its curve, its final losses, its speed, and the files of its folder."""
    reports = run["reports"]
    seconds = list(accumulate(starmap(seconds_between, pairwise(reports)), initial=0.0))
    curve = [
        {
            "step": report["step"],
            "tokens": report["progress/total_tokens"],
            "seconds": round(at, 3),
            **{key: round(report[key], 5) for key in (LOSS, VALIDATION) if key in report},
        }
        for report, at in zip(reports, seconds, strict=True)
    ]
    last = reports[-max(1, len(reports) // 20) :]  # as in titanlite report
    return {
        "final": {
            VALIDATION: reports[-1][VALIDATION],
            LOSS: statistics.median(report[LOSS] for report in last),
            "tokens": reports[-1]["progress/total_tokens"],
            "seconds": seconds[-1],
        },
        "tokens_per_second": statistics.median(report[TPS] for report in run["counted"]),
        "env": run["env"],
        "curve": curve,
        "files": {
            name: without_paths((folder / name).read_text()) for name in RECORDED if (folder / name).exists()
        },
        "reports": reports,
    }


def seconds_between(before: dict[str, Any], report: dict[str, Any]) -> float:
    """The seconds of steps and validation between two reports, without compilation, which later runs find in
    a cache."""
    steps_s = (report["step"] - before["step"]) * report["time/step_s"]
    return steps_s + report.get("time/validation_s", 0.0) - report.get("compile/seconds", 0.0)


def summary(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Compare the best rates of AdamW and Muon: losses, the spread of two seeds, and the tokens and seconds
    at which Muon has AdamW's final validation loss."""
    result: dict[str, Any] = {}
    for name in RATES:
        rates = rates_of(runs, name)
        if not rates:
            return {}
        losses = {lr: runs[Case(name, lr).name]["final"][VALIDATION] for lr in rates}
        best = min(losses, key=losses.__getitem__)
        second = runs.get(Case(name, best, SECOND_SEED).name, {}).get("final")
        result[name] = {
            "best_lr": best,
            "best_is_inside": rates[0] < best < rates[-1],
            "losses": [losses[best], *([second[VALIDATION]] if second else [])],
        }
    adamw, muon = (Case(name, result[name]["best_lr"]) for name in ("adamw", "muon"))
    final = runs[adamw.name]["final"]
    where = crossing(runs[muon.name]["curve"], final[VALIDATION])
    if where is not None:
        result["muon_reaches_adamw"] = {key: where[key] / final[key] for key in ("tokens", "seconds")}
    return result


def crossing(curve: list[dict[str, Any]], loss: float) -> dict[str, float] | None:
    """Where a validation curve first reaches a loss, between its points linearly; None: nowhere."""
    points = [point for point in curve if VALIDATION in point]
    for a, b in pairwise(points):
        if a[VALIDATION] > loss >= b[VALIDATION]:
            share = (a[VALIDATION] - loss) / (a[VALIDATION] - b[VALIDATION])
            return {key: a[key] + share * (b[key] - a[key]) for key in ("tokens", "seconds")}
    return None


def brief(result: dict[str, Any]) -> dict[str, Any]:
    """What is printed of a run."""
    return {key: result[key] for key in ("final", "tokens_per_second", "wall_s", "error") if key in result}


def write_folders(result: dict[str, Any], folder: Path) -> None:
    """Write each recorded run as a run folder, for `titanlite report`."""
    for name, run in result["runs"].items():
        if "error" in run:
            continue
        (folder / name).mkdir(parents=True, exist_ok=True)
        files = {**run["files"], "env.json": json.dumps(run["env"])}
        files["metrics.jsonl"] = "".join(json.dumps(report) + "\n" for report in run["reports"])
        for file, text in files.items():
            (folder / name / file).write_text(text)


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the validation losses by tokens and by time. Thick: the best rate of each optimizer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs, best = result["runs"], {name: result["summary"][name]["best_lr"] for name in RATES}
    names = [*RATES, *VARIANTS]
    colors = dict(zip(names, ("#4477aa", "#ee6677", "#228833", "#ccbb44")))
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 4), dpi=120, sharey=True)
    for run in (run for run in runs.values() if "curve" in run):
        points = [point for point in run["curve"] if VALIDATION in point]
        is_best = run["lr"] == best.get(run["optimizer"], run["lr"])
        label = f"{run['optimizer']}, {run['lr']:g}" if is_best and run["seed"] == 0 else None
        style = {"linewidth": 1.6 if is_best else 0.8, "alpha": 1.0 if is_best else 0.4}
        style["linestyle"] = "-" if run["seed"] == 0 else "--"
        for panel, key, unit in zip(axes, ("tokens", "seconds"), (1e6, 60)):
            x, y = [point[key] / unit for point in points], [point[VALIDATION] for point in points]
            panel.plot(x, y, color=colors[run["optimizer"]], label=label, **style)
    lowest = min(run["final"][VALIDATION] for run in runs.values() if "final" in run)
    axes[0].set(
        xlabel="million tokens", ylabel="validation loss (nats per token)", ylim=(lowest - 0.05, lowest + 1)
    )
    axes[1].set(xlabel="minutes on one GPU")
    axes[0].legend(frameon=False)
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
