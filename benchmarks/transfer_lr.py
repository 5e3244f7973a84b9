"""Does the best learning rate of a narrow model fit a wide one by the width rules, and without them?

    python benchmarks/transfer_lr.py --output benchmarks/results/transfer_lr_h200.json [--every 4]
        [--width 1152] [--rates 4e-4:6.4e-3:5] [--seeds 1,2] [--searches narrow,rules] [--budget-s 540]
        [--section.key=value ...]

Three searches by `titanlite tune transfer_lr.toml --optimizer.lr=...`, side by side on one GPU, with as many
blocks, steps and tokens:

narrow    the model of transfer_lr.toml, 30M
rules     the model at --width, with what `titanlite tune --coordinate-check` prints for it
standard  the same model with the narrow one's settings as they are: the control

Then a second seed for the two rates beside the best one of `narrow` and of `rules` (tune has trained the best
one with it). An optimum is the minimum of the parabola through the best rate and the two beside it.

`--seeds 1,2 --searches narrow,rules --rates ...` trains all rates with these seeds instead: one search per
model and seed, and no search for the rates beside the best one.

The text is that of text_by_kind.py, of one file in --every, unless outputs/text_by_kind exists. The output is
written after every run. After --budget-s the searches are stopped; the same command continues them.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.environment import without_paths, write_result  # noqa: E402
from titanlite.config import toml  # noqa: E402
from titanlite.lab.halving import SPREADS, Parabola, fit_parabola, neighbours  # noqa: E402
from titanlite.lab.width import SCALED_FIELDS  # noqa: E402

CONFIG = ROOT / "benchmarks/transfer_lr.toml"
RUNS, TEXT = ROOT / "outputs/transfer_lr", ROOT / "outputs/text_by_kind"
NARROW, RULES, STANDARD = SEARCHES = "narrow", "rules", "standard"
FIRST_SEED, SECOND_SEED = 0, 1
NEIGHBOURS = "_seed1"  # folders of the rates beside the best one, with the second seed
NAME = re.compile(r"rung1/lr=([^,]+)(?:,seed=(\d+))?")
TITANLITE = sys.executable, "-m", "titanlite.cli"

Losses = dict[int, dict[float, float]]  # by seed and learning rate; infinite for a run that diverged


class Searches:
    """Runs the searches, and writes what has ended."""

    def __init__(self, options: argparse.Namespace, overrides: list[str]):
        self.options, self.overrides = options, overrides
        self.end = time.monotonic() + options.budget_s
        self.keys: dict[str, list[str]] = {NARROW: []}  # of each search

    def run(self) -> None:
        """Run all searches at once."""
        RUNS.mkdir(parents=True, exist_ok=True)
        seeds = self.options.seeds or [None]
        with ThreadPoolExecutor(len(SEARCHES) * len(seeds)) as pool:
            names = self.options.searches.split(",")
            under_way = {pool.submit(self.search, NARROW, seed) for seed in seeds if NARROW in names}
            self.keys |= self.wide_keys()
            wide = [name for name in (RULES, STANDARD) if name in names]
            under_way |= {pool.submit(self.search, name, seed) for name in wide for seed in seeds}
            while under_way:
                done, under_way = wait(under_way, timeout=5)
                self.write()
                for search in done:
                    search.result()

    def search(self, name: str, seed: int | None) -> None:
        """Train all rates with `seed`. None: find the best rate with the first seed; then train those beside
        it with the second seed, but not in the control."""
        if seed is not None:
            only = [f"--training.seed={seed}", "--rungs=1", "--seeds=1"]
            self.tune(name, f"{name}_all{seed}", f"--optimizer.lr={self.options.rates}", *only)
            return
        whole = ["--rungs=1", f"--seeds={1 if name == STANDARD else 2}"]
        if not self.tune(name, name, f"--optimizer.lr={self.options.rates}", *whole) or name == STANDARD:
            return
        if beside := neighbours(losses_of(name)[FIRST_SEED])[::2]:
            rates = ",".join(f"{rate:g}" for rate in beside)
            only = [f"--training.seed={SECOND_SEED}", "--rungs=1", "--seeds=1"]
            self.tune(name, name + NEIGHBOURS, f"--optimizer.lr={rates}", *only)

    def tune(self, name: str, folder: str, *words: str) -> bool:
        """Run `titanlite tune` in `folder` until the budget is spent. Returns whether it came to its end."""
        command = [*TITANLITE, "tune", str(CONFIG), *self.overrides, *self.keys[name], *words]
        with (RUNS / f"{folder}.txt").open("a") as file:
            process = subprocess.Popen([*command, f"--output={RUNS / folder}"], stdout=file, stderr=file)
        try:
            process.wait(max(self.end - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            process.wait()
        return process.returncode == 0

    def wide_keys(self) -> dict[str, list[str]]:
        """The keys of the wide model: those that the rules set for it, and its shape alone."""
        narrow = toml.read(str(CONFIG), self.overrides)[0]["model"]["overrides"]["dim"]
        command = [*TITANLITE, "tune", str(CONFIG), *self.overrides, "--coordinate-check"]
        widths = [f"--base-width={narrow}", f"--target-width={self.options.width}"]
        check = subprocess.run([*command, *widths], stdout=subprocess.PIPE, text=True, check=False)
        (RUNS / "check.txt").write_text(check.stdout)
        settings = toml.parse(check.stdout[check.stdout.index("# settings") :])
        fields = settings["model"]["overrides"]
        groups = ", ".join(map(inline, settings["optimizer"]["param_groups"]))
        shape = {key: value for key, value in fields.items() if key not in SCALED_FIELDS}
        return {
            RULES: [*model_keys(fields), f"--optimizer.param_groups=[{groups}]"],
            STANDARD: model_keys(shape),
        }

    def write(self) -> None:
        """Write what has ended."""
        result = {
            "config": CONFIG.name,
            "overrides": self.overrides,
            "width": self.options.width,
            "env": run_environment(),
            "summary": summary({name: losses_of(name) for name in SEARCHES}),
            "searches": {name: {"keys": self.keys.get(name), "runs": runs_of(name)} for name in SEARCHES},
            "text": json.loads((TEXT / "summary.json").read_text()),
            "printed": {file.stem: without_paths(file.read_text()) for file in sorted(RUNS.glob("*.txt"))},
        }
        write_result(self.options.output, result, "torch")


def main() -> None:
    """Make the text, run the searches, and print the summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--every", type=int, default=4, help="read one file of text in so many")
    parser.add_argument("--width", type=int, default=1152, help="dim of the wide model")
    parser.add_argument("--rates", default="4e-4:6.4e-3:5", help="learning rates: LOW:HIGH:NUM")
    parser.add_argument("--seeds", type=numbers, help="train all rates with these seeds: N,N,...")
    parser.add_argument("--searches", default=",".join(SEARCHES), help="the searches that run")
    parser.add_argument("--budget-s", type=float, default=540, help="stop after so many seconds")
    options, overrides = parser.parse_known_args()
    searches = Searches(options, overrides)
    if not (TEXT / "summary.json").exists():
        script = [sys.executable, str(ROOT / "benchmarks/text_by_kind.py"), f"--folder={TEXT}"]
        subprocess.run([*script, f"--every={options.every}"], stdout=subprocess.DEVNULL, check=True)
    searches.run()
    print(json.dumps(json.loads(options.output.read_text())["summary"], indent=1))


def numbers(words: str) -> list[int]:
    return [int(word) for word in words.split(",")]


def model_keys(fields: Mapping[str, Any]) -> list[str]:
    return [f"--model.overrides.{key}={value}" for key, value in fields.items()]


def inline(group: Mapping[str, Any]) -> str:
    """An inline table of TOML. Strings and numbers look the same in JSON."""
    return "{" + ", ".join(f"{key} = {json.dumps(value)}" for key, value in group.items()) + "}"


def runs_of(name: str) -> list[dict[str, Any]]:
    """The runs of a search that have ended, with their last metrics."""
    runs = []
    folders = {RUNS / name: FIRST_SEED, RUNS / f"{name}{NEIGHBOURS}": SECOND_SEED}
    folders |= {path: int(path.name[-1]) for path in sorted(RUNS.glob(f"{name}_all?"))}
    for folder, default_seed in folders.items():
        if not (folder / "search.json").exists():
            continue
        for run, result in json.loads((folder / "search.json").read_text())["results"].items():
            settings = NAME.fullmatch(run)
            assert settings is not None, run
            lines = (folder / run / "metrics.jsonl").read_text().splitlines()
            seed = int(settings[2]) if settings[2] else default_seed
            runs.append({"lr": float(settings[1]), "seed": seed, **result, "last": json.loads(lines[-1])})
    return runs


def run_environment() -> dict[str, Any]:
    """The device and the versions of the runs."""
    envs = [json.loads(path.read_text()) for path in RUNS.glob("*/rung1/*/env.json")]
    return {key: env[key] for env in envs[:1] for key in ("device", "cuda", "torch", "python", "cpu_threads")}


def losses_of(name: str) -> Losses:
    """The losses of a search."""
    losses: Losses = {}
    for run in runs_of(name):
        loss = math.inf if run["loss"] is None else run["loss"]
        losses.setdefault(run["seed"], {})[run["lr"]] = loss
    return losses


def summary(searches: Mapping[str, Losses]) -> dict[str, Any]:
    """The optima by seed, and their ratios to those of the narrow model."""
    optima = {name: optima_of(losses) for name, losses in searches.items()}
    ratios: dict[str, dict[int, float]] = {}
    for name in (RULES, STANDARD):
        shared = optima[name].keys() & optima[NARROW].keys()
        ratios[name] = {
            seed: optima[name][seed].value / optima[NARROW][seed].value for seed in sorted(shared)
        }
    return {
        "losses": {
            name: {seed: table(of_seed) for seed, of_seed in by.items()} for name, by in searches.items()
        },
        "optima": {
            name: {seed: fit._asdict() for seed, fit in of_name.items()} for name, of_name in optima.items()
        },
        "ratios": ratios,
    }


def optima_of(losses: Losses) -> dict[int, Parabola]:
    """The optimum of each seed, with the interval that tune prints: within the noise, which is twice what
    the second seed changes at the best rate."""
    first, second = losses.get(FIRST_SEED, {}), losses.get(SECOND_SEED, {})
    best = min(first, key=first.__getitem__, default=None)
    noise = SPREADS * abs(second[best] - first[best]) if best in second else None
    fits = {seed: fit_parabola(of_seed, noise) for seed, of_seed in losses.items()}
    return {seed: fit for seed, fit in fits.items() if fit is not None}


def table(losses: Mapping[float, float]) -> dict[float, float | None]:
    """Losses in the order of the rates; None for a run that diverged."""
    return {rate: losses[rate] if math.isfinite(losses[rate]) else None for rate in sorted(losses)}


if __name__ == "__main__":
    main()
