"""Tokens/s, MFU and peak memory of a training configuration, measured with the real trainer on real text;
optionally compared with torchtitan 0.3.0, OLMo-core 3.0.0 or another checkout of titanlite.

    python benchmarks/throughput.py train_configs/llama3_1b.toml --ngpu 1 [--section.key=value ...]
        --output benchmarks/results/NAME.json [--before CHECKOUT]
        [--peer llama3_1b --peer "llama3_1b_sdpa --training.local_batch_size 16" ...]
        [--peer olmo_core:llama3_1b ...]
    python benchmarks/throughput.py benchmarks/results/NAME.json --output AGAIN.json [--rounds 2]

Tokenizer and data are replaced by the shipped ones (the standard library's source), so that nothing has to be
downloaded. The model, its vocabulary and the kernels are those of the configuration. Medians are over the
reports after the first `--skip` steps. The output includes the raw reports and the environment.

Each `--peer` names a configuration of benchmarks/torchtitan_peer/config_registry.py or, after `olmo_core:`,
of benchmarks/olmo_core_peer/configs.py; options of that program may follow it. The trainers run in turns, all
peers first, `--rounds` times each. `peers` in the output names the program of each configuration, and
`torchtitan` and `olmo_core` their versions. `ratios_to` has the ratios to each program's configuration with
the highest median of tokens/s. The peers train on random tokens; their MFU is computed from their tokens/s
with titanlite's FLOP formula. A run of torchtitan that fails is repeated once with
`--training.disable_cuda_graphs`; its later rounds have no CUDA graphs from the start. `cuda_graphs` in the
output says which runs recorded one. A configuration that fails again is left out, with its log in the output.

TORCHTITAN_PEER and OLMO_CORE_PEER name folders with the programs and what titanlite does not need itself:

    pip install --no-deps --target FOLDER torchtitan==0.3.0 spmd_types==0.2.3 torch_checkpointing==0.1.1
        torchdata==0.11.0 tyro==1.0.17 typeguard==4.6.1 docstring_parser==0.18.0 shtab==1.13.0
    pip install --no-deps --target FOLDER ai2-olmo-core==3.0.0 dataclass-extensions==0.5.0 bettermap==1.3.1
        dill==0.4.1 liger-kernel==0.6.4

All are pure Python: the folders may be copied to a machine without network, and `pip download` with the same
names gives wheels to unpack into them. OLMo-core also imports requests, rich and pyyaml. liger-kernel is for
its `fused_linear` loss. `tokenizers` and, for float8, `torchao` come with titanlite[float8,tokenizer].

With `--before` another checkout of titanlite, for example an older commit, runs in turns with this one.

In place of a configuration, a result of this program repeats its measurement: the configuration in
train_configs/, the overrides, the number of GPUs, of steps and of rounds, and the peers if it had any.
Results beside torchtitan 0.2.2 need `--peer`.
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
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.environment import without_paths, write_result  # noqa: E402

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


@dataclass(frozen=True)
class Program:
    """A trainer of another project, started by benchmarks/NAME_peer/train.py."""

    package: str
    folder: str
    """The variable of the environment that names the folder with its packages."""
    cuda_graphs: bool


PROGRAMS = {
    "torchtitan": Program("torchtitan", "TORCHTITAN_PEER", cuda_graphs=True),
    "olmo_core": Program("ai2-olmo-core", "OLMO_CORE_PEER", cuda_graphs=False),
}


def main() -> None:
    """Run all rounds and write the summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", help="a TOML file, or a result whose measurement is repeated")
    parser.add_argument("--ngpu", type=int, help="by default 1")
    parser.add_argument("--steps", type=int, help="by default 30")
    parser.add_argument("--skip", type=int, help="steps before the first report that counts; by default 10")
    parser.add_argument(
        "--peer", action="append", help="measure this configuration of a peer in turns with titanlite"
    )
    parser.add_argument(
        "--before", type=Path, help="measure this checkout of titanlite in turns with this one"
    )
    parser.add_argument("--rounds", type=int, help="by default 1")
    parser.add_argument("--output", type=Path, required=True)
    options, overrides = parser.parse_known_args()
    if options.config.endswith(".json"):
        overrides = repeat(options, json.loads(Path(options.config).read_text())) + overrides
    fill(options, {"ngpu": 1, "steps": 30, "skip": 10, "rounds": 1})
    for peer in options.peer or ():
        peer_command(peer, options.ngpu, "")  # refuses unknown programs before anything is measured
    runs: list[dict[str, Any]] = []
    for _ in range(options.rounds):
        run_round(options, overrides, runs)
        result = summary(options, overrides, runs)
        # After each round: earlier rounds are not lost if a limit on the time ends this program.
        write_result(options.output, {**result, "runs": runs}, "torch", "torchao", "flash-attn-4")
    print(json.dumps(result))
    missing = {parse_peer(peer)[0] for peer in options.peer or ()} - set(result.get("ratios_to", ()))
    if missing:
        sys.exit(f"no configuration of {' and '.join(sorted(missing))} ran; the logs are in the output")


def run_round(options: argparse.Namespace, overrides: list[str], runs: list[dict[str, Any]]) -> None:
    """Add a run of each trainer to `runs`, without the peers that failed before."""
    for peer in options.peer or ():
        earlier = [run for run in runs if run.get("peer") == peer]
        if any("failed" in run for run in earlier):
            continue
        graphs = not any("failed_with_cuda_graphs" in run for run in earlier)
        runs.append(measure_peer(options, peer, graphs))
        if "failed" in runs[-1]:
            print(f"{peer}: {runs[-1]['trainer']} failed: {runs[-1]['failed']}", flush=True)
        else:
            print(json.dumps(peer_medians(runs[-1:])), flush=True)
    if options.before is not None:
        runs.append(measure(options, overrides, root=options.before.resolve()) | {"trainer": "before"})
        print(json.dumps({"trainer": "before", **medians(runs[-1:], "before")}), flush=True)
    runs.append(measure(options, overrides))
    print(json.dumps({"trainer": "titanlite", **medians(runs[-1:], "titanlite")}), flush=True)


def summary(options: argparse.Namespace, overrides: list[str], runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what was measured, the medians of each trainer, and the ratios of titanlite's."""
    ours = medians(runs, "titanlite")
    result: dict[str, Any] = {
        "config": Path(options.config).name,
        "overrides": overrides,
        "ngpu": options.ngpu,
        "medians": ours,
    }
    if options.peer:
        peers, result["ratios_to"] = peer_medians(runs), {}
        for program in dict.fromkeys(parse_peer(peer)[0] for peer in options.peer):
            result[program] = peer_version(program)
            ran = {peer: measured for peer, measured in peers.items() if measured["program"] == program}
            if ran:
                theirs = ran[best := fastest(ran)]
                ratios = {key: ours[key] / theirs[key] for key in (TPS, RESERVED) if key in ours}
                result["ratios_to"][program] = {"peer": best, **ratios}
        if MFU in ours:  # the same model and formula
            for measured in peers.values():
                measured[MFU] = ours[MFU] * measured[TPS] / ours[TPS]
        result["peers"] = peers
    if options.before is not None:
        before = medians(runs, "before")
        result |= {
            "before_medians": before,
            "ratios_to_before": {k: ours[k] / before[k] for k in (TPS, RESERVED)},
        }
    return result


def repeat(options: argparse.Namespace, result: dict[str, Any]) -> list[str]:
    """Set what the command line leaves open to what a result had. Returns the result's overrides."""
    if "peer_options" in result and options.peer is None:
        sys.exit(
            f"{options.config} is beside torchtitan 0.2.2, which is no longer run: pass --peer with a "
            "configuration of torchtitan 0.3.0, or measure titanlite alone with its config and overrides"
        )
    run = next(run for run in result["runs"] if run["trainer"] == "titanlite")
    steps = [report["step"] for report in run["reports"]]
    skipped = set(steps) - {report["step"] for report in run["counted"]}
    options.config = f"train_configs/{result['config']}"
    had = {"ngpu": result["ngpu"], "rounds": result["medians"]["runs"]}
    if "peers" in result:
        had["peer"] = list(dict.fromkeys(run["peer"] for run in result["runs"] if "peer" in run))
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


def parse_peer(peer: str) -> tuple[str, str]:
    """Return the program that `--peer` names, and its configuration with options."""
    named = re.match(r"(\w+):(.*)", peer)
    program, rest = named.groups() if named else ("torchtitan", peer)
    if program not in PROGRAMS:
        sys.exit(f"--peer {peer}: unknown program {program}; choose {' or '.join(PROGRAMS)}")
    return program, rest


def peer_command(
    peer: str, ngpu: int, folder: Path | str, *arguments: str
) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of a run of a peer.

    Args:
        peer: what `--peer` takes
        folder: for the peer's output
        arguments: more options of the peer, before those in `peer`
    """
    program, rest = parse_peer(peer)
    variable = PROGRAMS[program].folder
    if variable not in os.environ:
        sys.exit(f"--peer {peer} needs {variable}, a folder with packages: see benchmarks/throughput.py")
    paths = [str(ROOT), os.environ[variable], os.environ.get("PYTHONPATH", "")]
    name, *options = shlex.split(rest)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ngpu}",
        "--local-ranks-filter=0", "-m", f"benchmarks.{program}_peer.train", "--config", name,
        "--dump_folder", str(folder), *arguments, *options,
    ]  # fmt: skip
    return command, {**os.environ, "PYTHONPATH": ":".join(filter(None, paths))}


def peer_version(program: str) -> str:
    """The version of a program in the folder that its variable names."""
    package, folder = PROGRAMS[program].package, os.environ[PROGRAMS[program].folder]
    return next((found.version for found in distributions(name=package, path=[folder])), "unknown")


def measure_peer(options: argparse.Namespace, peer: str, cuda_graphs: bool = True) -> dict[str, Any]:
    """Run a peer once, and if it fails with CUDA graphs, once more without them. Returns its reports with
    titanlite's metric names, or the end of its log as "failed"."""
    cuda_graphs = cuda_graphs and PROGRAMS[parse_peer(peer)[0]].cuda_graphs
    run = run_peer(options, peer, cuda_graphs)
    if "failed" in run and cuda_graphs:
        run = run_peer(options, peer, cuda_graphs=False) | {"failed_with_cuda_graphs": run["failed"]}
    return run


def run_peer(options: argparse.Namespace, peer: str, cuda_graphs: bool) -> dict[str, Any]:
    """Run a peer once."""
    program, _ = parse_peer(peer)
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--training.steps", str(options.steps), "--metrics.log_freq", "5"]
        if PROGRAMS[program].cuda_graphs and not cuda_graphs:
            arguments.append("--training.disable_cuda_graphs")
        command, env = peer_command(peer, options.ngpu, folder, *arguments)
        began = time.perf_counter()
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    log = without_paths(done.stdout, os.environ[PROGRAMS[program].folder], folder)
    reports = peer_reports(log)
    run: dict[str, Any] = {
        "trainer": program,
        "peer": peer,
        "wall_s": time.perf_counter() - began,
        "cuda_graphs": "Recorded CUDA graph" in log,
        "changes": re.findall(rf"{program}_peer: (.*)", log),
        "counted": [report for report in reports if report["step"] > options.skip],
        "reports": reports,
    }
    if done.returncode != 0 or not run["counted"]:
        run["failed"] = f"exit code {done.returncode}\n{log[-6000:]}"
    return run


def peer_medians(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the program and the medians of each peer that never failed (torchtitan: without CUDA graphs),
    and whether all of its runs recorded a CUDA graph."""
    by_peer: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        if "peer" in run:
            by_peer.setdefault(run["peer"], []).append(run)
    return {
        peer: {
            "program": theirs[0]["trainer"],
            **medians(theirs, theirs[0]["trainer"]),
            "cuda_graphs": all(run["cuda_graphs"] for run in theirs),
        }
        for peer, theirs in by_peer.items()
        if not any("failed" in run for run in theirs)
    }


def fastest(peers: dict[str, dict[str, Any]]) -> str:
    """Return the peer with the highest median of tokens/s."""
    return max(peers, key=lambda peer: peers[peer][TPS])


def peer_reports(log: str) -> list[dict[str, float]]:
    """Parse the lines of steps in a peer's log. Their memory is the peak of reserved memory."""
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
