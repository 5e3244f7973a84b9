"""How many steps does an optimizer need to reach a loss? AdamW, Muon and NorMuon on optimizer_race.toml.

    python benchmarks/optimizer_race.py --output benchmarks/results/optimizer_race_h100.json
        [--target 1.6] [--devices 0,1,2,3] [--runs-per-device 2] [--budget-s 540] [--resume FILE.json]
        [--section.key=value ...]

Each optimizer is tuned by the same number of trials of --trial-steps steps: six learning rates at equal
ratios. With the best rate it then runs whole, in the lengths of --lengths, each with three seeds and the
schedule of its length. Its result is the number of steps at which the mean final validation loss of the seeds
is --target, which is chosen before: on a straight line between two lengths over the logarithm of the steps,
or more than the longest. A best rate at an end of its range is reported as such.

Several runs share a device, so times mean nothing here. The output is written after each run; with --resume,
runs in that file are not repeated, and none starts after --budget-s.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.devices import on_devices  # noqa: E402
from benchmarks.environment import without_paths, write_result  # noqa: E402
from benchmarks.package_text import FOLDER, MEGABYTES, package_text  # noqa: E402
from benchmarks.throughput import measure  # noqa: E402

CONFIG = ROOT / "benchmarks/optimizer_race.toml"
RUNS = ROOT / "outputs/optimizer_race"
MUON = ["--optimizer.name=muon", "--optimizer.adjust_lr_fn=original", "--optimizer.weight_decay=0.0125"]
OPTIMIZERS = {  # keys, and the lowest and the highest rate
    "adamw": (["--optimizer.name=adamw", "--optimizer.weight_decay=0.1"], (1e-3, 8e-3)),
    "muon": ([*MUON, "--optimizer.adamw_lr_multiplier=0.1"], (1e-2, 8e-2)),
    "normuon": ([*MUON, "--optimizer.adamw_lr_multiplier=0.1", "--optimizer.normalize=neuron"], (1e-2, 8e-2)),
}
NUM_TRIALS, SEEDS = 6, (1, 2, 3)
LOSS = "eval/loss"


class Case(NamedTuple):
    """One run. `is_trial`: to tune the rate."""

    optimizer: str
    lr: float
    steps: int
    seed: int
    is_trial: bool

    @property
    def name(self) -> str:
        kind = "trial" if self.is_trial else "run"
        return f"{self.optimizer}_{kind}_lr{self.lr:g}_steps{self.steps}_seed{self.seed}"

    @property
    def keys(self) -> list[str]:
        keys = OPTIMIZERS[self.optimizer][0]
        return [*keys, f"--optimizer.lr={self.lr:g}", f"--training.seed={self.seed}"]


class Race:
    """Runs cases that have no result yet, and writes the output after each of them."""

    def __init__(self, options: argparse.Namespace, overrides: list[str]):
        self.options, self.overrides, self.began = options, overrides, time.monotonic()
        self.lock, self.losses = threading.Lock(), dict[str, float]()
        self.text = package_text(ROOT / FOLDER, options.megabytes)
        self.errors = dict[str, str]()
        if options.resume is not None:
            before = json.loads(options.resume.read_text())
            if before["text"]["sha256"] != self.text["sha256"] or before["overrides"] != overrides:
                sys.exit(f"{options.resume}: runs on another text, or with other overrides")
            self.losses = before["losses"]

    def run(self, cases: list[Case]) -> bool:
        """Run the cases. Returns whether there was time for all."""
        devices = self.options.devices.split(",") * self.options.runs_per_device
        on_devices(devices, [case for case in cases if case.name not in self.losses], self._run)
        return all(case.name in self.losses for case in cases)

    def _run(self, device: str, case: Case) -> None:
        if time.monotonic() - self.began > self.options.budget_s:
            return
        folder = RUNS / case.name
        shutil.rmtree(folder, ignore_errors=True)
        options = argparse.Namespace(config=str(CONFIG), ngpu=1, skip=0, steps=case.steps)
        try:
            run = measure(options, [*self.overrides, *case.keys], device, folder=folder, data=[])
            loss = run["reports"][-1][LOSS]
        except (subprocess.CalledProcessError, OSError, LookupError) as e:
            loss = math.inf
            with self.lock:
                self.errors[case.name] = f"{e}: {without_paths((folder / 'log.txt').read_text()[-1000:])}"
        with self.lock:
            self.losses[case.name] = loss
            self.write()
        print(case.name, loss, flush=True)

    def trials(self, optimizer: str) -> list[Case]:
        low, high = OPTIMIZERS[optimizer][1]
        ratio = (high / low) ** (1 / (NUM_TRIALS - 1))
        rates = [float(f"{low * ratio**i:.3g}") for i in range(NUM_TRIALS)]
        return [Case(optimizer, lr, self.options.trial_steps, 0, True) for lr in rates]

    def best(self, optimizer: str) -> Case | None:
        """The best trial; None before all have ended."""
        trials = self.trials(optimizer)
        if not all(case.name in self.losses for case in trials):
            return None
        return min(trials, key=lambda case: self.losses[case.name])

    def runs(self, optimizer: str) -> list[Case]:
        best = self.best(optimizer)
        if best is None:
            return []
        return [Case(optimizer, best.lr, n, seed, False) for n in self.options.lengths for seed in SEEDS]

    def result(self, optimizer: str) -> dict[str, Any]:
        """What is known of an optimizer."""
        best, means, spreads = self.best(optimizer), dict[int, float](), dict[int, float]()
        for steps in self.options.lengths:
            cases = [case for case in self.runs(optimizer) if case.steps == steps]
            losses = [self.losses[case.name] for case in cases if case.name in self.losses]
            if losses and len(losses) == len(cases):
                means[steps], spreads[steps] = statistics.mean(losses), max(losses) - min(losses)
        rates = [case.lr for case in self.trials(optimizer)]
        return {
            "lr": best and best.lr,
            "is_inside": best is not None and best.lr not in (rates[0], rates[-1]),
            "mean_losses": means,
            "spreads": spreads,
            "steps_to_target": steps_to(self.options.target, means),
        }

    def write(self) -> None:
        result = {
            "config": CONFIG.name,
            "overrides": self.overrides,
            "text": self.text,
            "target": self.options.target,
            "trial_steps": self.options.trial_steps,
            "results": {name: self.result(name) for name in OPTIMIZERS},
            "losses": self.losses,
            "errors": self.errors,
        }
        write_result(self.options.output, result, "torch")


def steps_to(target: float, means: dict[int, float]) -> float | None:
    """The steps at which the mean loss is `target`; None if no two lengths have it between them."""
    for (few, high), (many, low) in pairwise(sorted(means.items())):
        if high > target >= low:
            share = (high - target) / (high - low)
            return round(math.exp(math.log(few) + share * (math.log(many) - math.log(few))), 1)
    return None


def main() -> None:
    """Run the trials, then the lengths."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--target", type=float, default=1.6, help="validation loss, in nats per token")
    parser.add_argument("--devices", default="0", help="devices to use")
    parser.add_argument("--runs-per-device", type=int, default=1)
    parser.add_argument("--budget-s", type=float, default=540)
    parser.add_argument("--trial-steps", type=int, default=200)
    parser.add_argument(
        "--lengths", type=lambda text: [int(n) for n in text.split(",")], default=[300, 450, 675]
    )
    parser.add_argument("--megabytes", type=int, default=MEGABYTES, help="largest amount of text to train on")
    options, overrides = parser.parse_known_args()
    race = Race(options, overrides)
    if race.run([case for name in OPTIMIZERS for case in race.trials(name)]):
        race.run([case for name in OPTIMIZERS for case in race.runs(name)])
    race.write()
    print(json.dumps({name: race.result(name) for name in OPTIMIZERS}, indent=1))


if __name__ == "__main__":
    main()
