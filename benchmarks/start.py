"""Seconds from the command to the first step: cold, with a compile cache that the run before has filled, and
resumed from a checkpoint; optionally beside torchtitan 0.3.0 or OLMo-core 3.0.0.

    python benchmarks/start.py train_configs/llama3_1b.toml --ngpu 1 [--section.key=value ...]
        --output benchmarks/results/NAME.json [--rounds 2] [--without-checkpoints]
        [--peer "llama3_1b [--training.local_batch_size 16 ...]"]

Each round begins with empty compile caches of its own. `first_line_s`: until the program's first line, after
its imports. `set_up_s`: until titanlite's line "steps 1 to N". `first_step_s`: until the line of the first
step. Times are the clock's from the start of the launcher to the arrival of the line. With
`--without-checkpoints` nothing is saved and there is no resumed start, for models with large checkpoints.
Tokenizer and data are those of benchmarks/throughput.py, whose docstring says what a peer needs. Here there
is at most one, and the measurement ends if it fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
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
from benchmarks.throughput import SHIPPED_DATA, parse_peer, peer_command, peer_version  # noqa: E402

STEPS = 3
MOMENTS = {
    "first_line_s": re.compile(r"\[rank0\]|\[titan\]"),
    "set_up_s": re.compile(r"\] \S* ?steps \d+ to \d+"),
    "first_step_s": re.compile(r"\bstep:? +\d+\b.*\bloss"),
}
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def main() -> None:
    """Run all starts of all rounds and write the medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config")
    parser.add_argument("--ngpu", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--peer", help="start this configuration of a peer in turns with titanlite")
    parser.add_argument("--without-checkpoints", action="store_true")
    parser.add_argument("--output", type=Path, required=True)
    options, overrides = parser.parse_known_args()
    starts: list[dict[str, Any]] = []
    for round_ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            for name, command, environment in commands(options, overrides, Path(folder)):
                starts.append({"start": name, "round": round_, **timed(command, environment)})
                print(json.dumps(starts[-1]), flush=True)
            ran_on = json.loads(Path(folder, "second/env.json").read_text())
            del ran_on["command"], ran_on["platform"]  # they name this machine's folders and kernel
    medians = {
        name: {
            moment: round(statistics.median(s[moment] for s in starts if s["start"] == name), 2)
            for moment in MOMENTS
            if all(moment in s for s in starts if s["start"] == name)
        }
        for name in dict.fromkeys(s["start"] for s in starts)
    }
    result = {
        "config": Path(options.config).name,
        "overrides": overrides,
        "peer_options": options.peer,
        "ngpu": options.ngpu,
        "env": ran_on,
        "medians": medians,
        "starts": starts,
    }
    if options.peer is not None:
        program = parse_peer(options.peer)[0]
        result[program] = peer_version(program)
    print(json.dumps(medians))
    write_result(options.output, result, "torch")


def commands(
    options: argparse.Namespace, overrides: list[str], folder: Path
) -> list[tuple[str, list[str], dict[str, str]]]:
    """Name, command and environment of each start of a round, in order."""
    ours = [str(ROOT / "run_train.sh"), options.config, *SHIPPED_DATA, *overrides]
    ours += [
        f"--compile.cache_dir={folder / 'ours'}",
        f"--checkpoint.enable={str(not options.without_checkpoints).lower()}",
        "--lr_scheduler.warmup_steps=0",
    ]
    env = os.environ | {"NGPU": str(options.ngpu), "PYTHON": sys.executable}
    env.pop("TORCHINDUCTOR_CACHE_DIR", None)
    starts = []
    if options.peer is not None:
        arguments = ["--training.steps", str(STEPS), "--metrics.log_freq", "1"]
        theirs, peer_env = peer_command(options.peer, options.ngpu, folder / "peer", *arguments)
        peer_env["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "theirs")
        program = parse_peer(options.peer)[0]
        starts += [(f"{program}, {kind}", theirs, peer_env) for kind in ("cold", "second")]
    runs = [("titanlite, cold", "cold", STEPS), ("titanlite, second", "second", STEPS)]
    if not options.without_checkpoints:
        runs.append(("titanlite, resumed", "second", 2 * STEPS))
    for name, dump, steps in runs:
        where = [f"--job.dump_folder={folder / dump}", f"--training.steps={steps}"]
        starts.append((name, [*ours, *where], env))
    return starts


def timed(command: list[str], environment: dict[str, str]) -> dict[str, float]:
    """Run a command. Returns the seconds until each moment of MOMENTS that its output shows."""
    moments, log = dict[str, float](), []
    began = time.perf_counter()
    with subprocess.Popen(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            log.append(line)
            for name, pattern in MOMENTS.items():
                if name not in moments and pattern.search(COLOURS.sub("", line)):
                    moments[name] = round(time.perf_counter() - began, 2)
    if process.returncode != 0 or "first_step_s" not in moments:
        sys.exit(f"{command[0]} ended with {process.returncode}:\n{''.join(log)[-6000:]}")
    return moments


if __name__ == "__main__":
    main()
