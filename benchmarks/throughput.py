"""Tokens/s, MFU and peak memory of a training configuration, measured with the real trainer on real text;
optionally compared with torchtitan 0.2.2 or with another checkout of titanlite.

    python benchmarks/throughput.py train_configs/llama3_1b.toml --ngpu 1 [--section.key=value ...]
        --output benchmarks/results/NAME.json [--before CHECKOUT]
        [--peer "--training.local_batch_size 16 ..."]
    python benchmarks/throughput.py benchmarks/results/NAME.json --output AGAIN.json [--rounds 2]

Tokenizer and data are replaced by the shipped ones (the standard library's source), so that nothing has to be
downloaded. The model, its vocabulary and the kernels are those of the configuration. Medians are over the
reports after the first `--skip` steps. The output includes the raw reports and the environment.

With `--peer` the two trainers run in turns, torchtitan first, `--rounds` times each, and the output has the
ratios of the medians over all rounds. torchtitan gets the options in the string and trains on random tokens.
TORCHTITAN_PEER names a folder with its torchtitan.toml and the modules that the file imports. Its MFU is
computed from its tokens/s with titanlite's FLOP formula.

With `--before` another checkout of titanlite, for example an older commit, runs in turns with this one.

In place of a configuration, a result of this program repeats its measurement: the configuration in
train_configs/, the overrides, the number of GPUs, of steps and of rounds, and torchtitan's options if it had
any.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.environment import write_result  # noqa: E402

SHIPPED_DATA = [
    "--tokenizer.name=tiktoken",
    f"--tokenizer.path={ROOT / 'assets/tokenizer/stdlib.tiktoken'}",
    "--tokenizer.num_special_tokens=2",
    '--data.sources=[{name="python_stdlib"}]',
    "--data.holdout_sequences=0",
    "--validation.enable=false",
    "--checkpoint.enable=false",
    "--metrics.sinks=[]",
    "--metrics.log_freq=5",
    "--lr_scheduler.warmup_steps=10",
]
TPS, MFU = "throughput/tokens_per_second_per_device", "throughput/mfu"
RESERVED = "memory/peak_reserved_gib"
KEYS = (TPS, MFU, RESERVED, "memory/peak_allocated_gib", "time/step_s", "time/data_wait_pct")


def main() -> None:
    """Run all rounds and write the summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", help="a TOML file, or a result whose measurement is repeated")
    parser.add_argument("--ngpu", type=int, help="by default 1")
    parser.add_argument("--steps", type=int, help="by default 30")
    parser.add_argument("--skip", type=int, help="steps before the first report that counts; by default 10")
    parser.add_argument("--peer", help="measure torchtitan, with these options, in turns with titanlite")
    parser.add_argument(
        "--before", type=Path, help="measure this checkout of titanlite in turns with this one"
    )
    parser.add_argument("--rounds", type=int, help="by default 1")
    parser.add_argument("--output", type=Path, required=True)
    options, overrides = parser.parse_known_args()
    if options.config.endswith(".json"):
        overrides = repeat(options, json.loads(Path(options.config).read_text())) + overrides
    fill(options, {"ngpu": 1, "steps": 30, "skip": 10, "rounds": 1})
    runs = []
    for _ in range(options.rounds):
        if options.peer is not None:
            runs.append(measure_peer(options))
            print(json.dumps({"trainer": "torchtitan", **medians(runs[-1:], "torchtitan")}), flush=True)
        if options.before is not None:
            runs.append(measure(options, overrides, root=options.before.resolve()) | {"trainer": "before"})
            print(json.dumps({"trainer": "before", **medians(runs[-1:], "before")}), flush=True)
        runs.append(measure(options, overrides))
        print(json.dumps({"trainer": "titanlite", **medians(runs[-1:], "titanlite")}), flush=True)
    ours = medians(runs, "titanlite")
    result: dict[str, Any] = {
        "config": Path(options.config).name,
        "overrides": overrides,
        "ngpu": options.ngpu,
        "medians": ours,
    }
    if options.peer is not None:
        theirs = medians(runs, "torchtitan")
        if MFU in ours:  # the same model and formula
            theirs[MFU] = ours[MFU] * theirs[TPS] / ours[TPS]
        ratios = {key: ours[key] / theirs[key] for key in (TPS, RESERVED)}
        result |= {"peer_options": options.peer, "peer_medians": theirs, "ratios": ratios}
    if options.before is not None:
        before = medians(runs, "before")
        result |= {
            "before_medians": before,
            "ratios_to_before": {k: ours[k] / before[k] for k in (TPS, RESERVED)},
        }
    print(json.dumps(result))
    write_result(options.output, {**result, "runs": runs}, "torch", "torchao", "flash-attn-4", "torchtitan")


def repeat(options: argparse.Namespace, result: dict[str, Any]) -> list[str]:
    """Set what the command line leaves open to what a result had. Returns the result's overrides."""
    run = next(run for run in result["runs"] if run["trainer"] == "titanlite")
    steps = [report["step"] for report in run["reports"]]
    skipped = set(steps) - {report["step"] for report in run["counted"]}
    options.config = f"train_configs/{result['config']}"
    had = {"ngpu": result["ngpu"], "rounds": result["medians"]["runs"], "peer": result.get("peer_options")}
    fill(options, had | {"steps": steps[-1], "skip": max(skipped, default=0)})
    overrides: list[str] = result["overrides"]
    return overrides


def fill(options: argparse.Namespace, values: dict[str, Any]) -> None:
    """Set the options that are None."""
    for name, value in values.items():
        if getattr(options, name) is None:
            setattr(options, name, value)


def measure(
    options: argparse.Namespace,
    overrides: list[str],
    device: str | None = None,
    root: Path = ROOT,
    folder: Path | None = None,
    data: Sequence[str] = SHIPPED_DATA,
) -> dict[str, Any]:
    """Run titanlite once. Returns its reports. `device`: the only visible device. `root`: the checkout.
    `folder`: a new folder for the run and for its output, `log.txt`; None: a temporary one, and the output is
    this program's. `data`: overrides that come before `overrides`."""
    with ExitStack() as stack:
        log = None
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        else:
            folder.mkdir(parents=True)
            log = stack.enter_context((folder / "log.txt").open("w"))
        command = [str(root / "run_train.sh"), options.config, f"--training.steps={options.steps}"]
        command += [*data, *overrides, f"--job.dump_folder={folder}"]
        began = time.perf_counter()
        env = os.environ | {"NGPU": str(options.ngpu), "PYTHON": sys.executable}
        if device is not None:
            env["CUDA_VISIBLE_DEVICES"] = device
        # Python imports titanlite from cwd first.
        subprocess.run(command, env=env, check=True, cwd=root, stdout=log, stderr=log)
        wall_s = time.perf_counter() - began
        reports = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        ran_on = json.loads((folder / "env.json").read_text())
    del ran_on["command"], ran_on["platform"]  # they name this machine's folders and kernel
    counted = [report for report in reports if report["step"] > options.skip]
    return {"trainer": "titanlite", "wall_s": wall_s, "env": ran_on, "counted": counted, "reports": reports}


def measure_peer(options: argparse.Namespace) -> dict[str, Any]:
    """Run torchtitan once. Returns its reports with titanlite's metric names."""
    peer = Path(os.environ["TORCHTITAN_PEER"])
    env = os.environ | {"PYTHONPATH": f"{peer}:{os.environ.get('PYTHONPATH', '')}"}
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={options.ngpu}",
            "-m", "torchtitan.train", "--job.config_file", str(peer / "torchtitan.toml"),
            "--job.dump_folder", folder, "--training.steps", str(options.steps), "--metrics.log_freq", "5",
            *shlex.split(options.peer),
        ]  # fmt: skip
        began = time.perf_counter()
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    reports = peer_reports(done.stdout)
    if done.returncode != 0 or not reports:
        sys.exit(f"torchtitan ended with {done.returncode}:\n{done.stdout[-6000:]}")
    counted = [report for report in reports if report["step"] > options.skip]
    return {
        "trainer": "torchtitan",
        "wall_s": time.perf_counter() - began,
        "counted": counted,
        "reports": reports,
    }


def peer_reports(log: str) -> list[dict[str, float]]:
    """Parse torchtitan's log lines of steps. Its memory is the peak of reserved memory."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", log)
    matches = re.findall(r"step: +(\d+) .*?loss: +([\d.]+).*?memory: +([\d.]+)GiB.*?tps: +([\d,]+)", plain)
    return [
        {"step": int(step), "train/loss": float(loss), RESERVED: float(gib), TPS: float(tps.replace(",", ""))}
        for step, loss, gib, tps in {match[0]: match for match in matches}.values()
    ]


def medians(runs: list[dict[str, Any]], trainer: str) -> dict[str, float]:
    """Return the medians over the counted reports of all runs of a trainer; for memory, the maximum."""
    counted = [report for run in runs if run["trainer"] == trainer for report in run["counted"]]
    result = {
        key: (max if key.startswith("memory/") else statistics.median)(report[key] for report in counted)
        for key in KEYS
        if all(key in report for report in counted)
    }
    return {**result, "runs": sum(run["trainer"] == trainer for run in runs)}


if __name__ == "__main__":
    main()
