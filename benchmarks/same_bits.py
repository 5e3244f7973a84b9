"""What training.same_bits_on_any_ranks costs, and whether it holds: tokens/s and peak memory beside
training.deterministic, and the digests of the weights after each step on several numbers of GPUs.

    python benchmarks/same_bits.py train_configs/llama3_1b.toml --output benchmarks/results/NAME.json
        [--ngpu 2] [--rounds 2] [--variants deterministic,same_bits] [--digests 1,2,4]
        [--section.key=value ...]

The variants run in turns. If the machine has GPUs for two runs, two variants run at the same time, and
change their GPUs from round to round. Data, tokenizer and medians are those of throughput.py. With --digests
and --metrics.digest_freq, the digests of runs on these numbers of GPUs are compared instead, and the program
fails unless they are equal.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate, repeat
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.environment import write_result  # noqa: E402
from benchmarks.throughput import KEYS, measure, medians  # noqa: E402

VARIANTS = {
    "default": [],
    "deterministic": ["--training.deterministic", "--parallelism.fsdp_reduce=micro_batch"],
    "same_bits": ["--training.same_bits_on_any_ranks"],
}
DIGEST = "train/weights_digest"


def main() -> None:
    """Run all rounds, or all numbers of GPUs, and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config")
    parser.add_argument("--ngpu", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--skip", type=int, default=5, help="steps before the first report that counts")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--variants", type=lambda text: text.split(","), default=list(VARIANTS)[1:])
    parser.add_argument("--digests", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--output", type=Path, required=True)
    options, overrides = parser.parse_known_args()
    result = {"config": Path(options.config).name, "overrides": overrides}
    result |= compare_digests(options, overrides) if options.digests else in_turns(options, overrides)
    print(json.dumps({key: value for key, value in result.items() if key != "runs"}))
    write_result(options.output, result, "torch")
    if options.digests and not result["equal"]:
        sys.exit("the digests differ")


def in_turns(options: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    """The medians of each variant, ratios to the first variant, and the raw reports."""
    num_groups = min(max(torch.cuda.device_count() // options.ngpu, 1), 2, len(options.variants))
    runs = list[dict[str, Any]]()
    for round_ in range(options.rounds):
        order = options.variants[round_ % 2 :] + options.variants[: round_ % 2]
        for i in range(0, len(order), num_groups):
            runs += side_by_side(options, overrides, order[i : i + num_groups])
            print(json.dumps({run["trainer"]: medians([run], run["trainer"]) for run in runs[-num_groups:]}))
    by_variant = {name: medians(runs, name) for name in options.variants}
    first = by_variant[options.variants[0]]
    keys = [key for key in KEYS if first.get(key)]
    ratios = {name: {key: own[key] / first[key] for key in keys} for name, own in by_variant.items()}
    return {"ngpu": options.ngpu, "medians": by_variant, "ratios": ratios, "runs": runs}


def side_by_side(
    options: argparse.Namespace, overrides: list[str], variants: list[str]
) -> list[dict[str, Any]]:
    """Run each variant on its own GPUs, at the same time. The runs share the machine's CPU."""

    keys = [[*VARIANTS[name], *overrides] for name in variants]
    begins = [i * options.ngpu for i in range(len(variants))]
    with ThreadPoolExecutor() as pool:
        runs = pool.map(partial(run_on, options, options.ngpu), keys, begins)
        return [run | {"trainer": name} for name, run in zip(variants, runs)]


def compare_digests(options: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    """The digests by step for each number of GPUs. Runs that fit on the machine together run together."""
    keys = [*VARIANTS["same_bits"], "--metrics.log_freq=1", *overrides]
    digests, environments = dict[str, Any](), dict[str, Any]()
    remaining, num_gpus = list(options.digests), max(torch.cuda.device_count(), 1)
    while remaining:
        together = [remaining.pop(0)]
        while remaining and sum(together) + remaining[0] <= num_gpus:
            together.append(remaining.pop(0))
        with ThreadPoolExecutor() as pool:
            begins = [0, *accumulate(together)]
            runs = list(pool.map(partial(run_on, options), together, repeat(keys), begins))
        for ngpu, run in zip(together, runs):
            of_steps = {str(report["step"]): report.get(DIGEST) for report in run["reports"]}
            environments[str(ngpu)] = run["env"]
            digests[str(ngpu)] = {step: digest for step, digest in of_steps.items() if digest}
            print(ngpu, digests[str(ngpu)], f"{run['wall_s']:.0f} s", flush=True)
    first, *others = digests.values()
    equal = bool(first) and all(first == other for other in others)
    return {"equal": equal, "digests": digests, "keys": keys, "environments": environments}


def run_on(options: argparse.Namespace, ngpu: int, overrides: list[str], first: int) -> dict[str, Any]:
    """Run titanlite once, on `ngpu` GPUs from number `first` on."""
    device = ",".join(map(str, range(first, first + ngpu))) if torch.cuda.is_available() else None
    options = argparse.Namespace(**{**vars(options), "ngpu": ngpu})
    return measure(options, overrides, device)


if __name__ == "__main__":
    main()
