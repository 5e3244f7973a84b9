"""The cost of checkpoints: how long a save blocks training, how much slower steps are while it is written,
and how much time verification adds to loading. For one GPU, with the 1.5e9-parameter Llama (17 GB of state).

    python benchmarks/checkpoint.py saves async|disabled    titanlite
    python benchmarks/checkpoint.py peer async|disabled|async_with_pinned_mem    torchtitan 0.3.0
    python benchmarks/checkpoint.py load    with and without the hashes, from cache and from disk
    each with --output benchmarks/results/NAME.json

Both trainers are timed from outside, by the arrival times of the lines that they log per step. The cost of a
save at step k is the time between lines k - 1 and k + 2, minus three median steps without a save. This holds
whether a trainer logs a step before or after its save, and waits for the save immediately or at the next
step. `peer` trains the same model with the same batch and steps on random tokens, and needs TORCHTITAN_PEER
as benchmarks/throughput.py says."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.environment import environment, without_paths  # noqa: E402
from benchmarks.throughput import SHIPPED_DATA, peer_command, peer_version  # noqa: E402

CONFIG = ROOT / "train_configs/llama3_1b.toml"
WARM = 12  # steps that do not count: compilation, pinning of memory


def main() -> None:
    """Run one case and write the summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", choices=["saves", "peer", "load"])
    parser.add_argument("mode", nargs="?", default="async")
    parser.add_argument("--config", default=str(CONFIG))
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--interval", type=int, default=80)
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs/benchmark_checkpoint")
    parser.add_argument("--output", type=Path)
    options, overrides = parser.parse_known_args()
    if options.folder.exists():
        parser.error(f"{options.folder} exists: the benchmark deletes its folder when it is done")
    if options.case == "load":
        result = load_case(options, overrides)
    else:
        result = save_case(options, overrides)
    shutil.rmtree(options.folder, ignore_errors=True)
    if options.case == "peer":
        result["torchtitan"] = peer_version("torchtitan")
    result = {"case": options.case, **result, "environment": environment("torch", "torchao")}
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k not in ("gaps_s", "environment", "lines")}))


def titanlite_command(options: argparse.Namespace, overrides: list[str]) -> list[str]:
    """Return the command of the real trainer on the shipped data."""
    return [
        str(ROOT / "run_train.sh"), options.config, *SHIPPED_DATA, f"--job.dump_folder={options.folder}",
        f"--training.steps={options.steps}", "--metrics.log_freq=1", "--checkpoint.enable=true",
        f"--checkpoint.interval={options.interval}", "--checkpoint.keep_latest_k=2", *overrides,
    ]  # fmt: skip


def save_case(options: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    """Train with saves. Returns the cost of each save."""
    env = os.environ | {"NGPU": "1", "PYTHON": sys.executable, "PYTHONUNBUFFERED": "1"}
    if options.case == "saves":
        command = titanlite_command(options, [f"--checkpoint.async_mode={options.mode}", *overrides])
    else:
        command, peer_env = peer_command(
            "llama3_1b", 1, options.folder, "--training.steps", str(options.steps), "--metrics.log_freq", "1",
            "--checkpoint.enable", "--checkpoint.interval", str(options.interval),
            "--checkpoint.async_mode", options.mode, "--checkpoint.keep_latest_k", "2", *overrides,
        )  # fmt: skip
        env["PYTHONPATH"] = peer_env["PYTHONPATH"]
    arrived: dict[int, float] = {}
    about_saves = []
    began = time.perf_counter()
    for at, line in lines_of(command, env):
        plain = re.sub(r"\x1b\[[0-9;]*m", "", line)
        plain = without_paths(plain, os.environ.get("TORCHTITAN_PEER", ""))
        if match := re.search(r"\bstep:? +(\d+)\b(?=.*loss)", plain):
            arrived.setdefault(int(match[1]), at - began)
        elif re.search(r"saved|[Ss]aving|checkpoint|staging|pinned", plain):
            about_saves.append(f"{at - began:.2f} {plain.strip()[-160:]}")
    return {"trainer": options.case, "mode": options.mode, **summary(arrived, about_saves, options.interval)}


def lines_of(command: list[str], env: dict[str, str]) -> Iterator[tuple[float, str]]:
    """Yield the lines of a program's output with their arrival times. A failure adds a last line; the earlier
    lines count."""
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    tail: list[str] = []
    for line in process.stdout:
        tail = [*tail[-40:], line]
        yield time.perf_counter(), line
    if process.wait() != 0:
        print("".join(tail), file=sys.stderr)
        yield time.perf_counter(), f"checkpoint benchmark: ended with exit code {process.returncode}"


def summary(arrived: dict[int, float], about_saves: list[str], interval: int) -> dict[str, Any]:
    """Return the costs of the saves, computed from the arrival times of the steps' lines."""
    steps = sorted(arrived)
    gaps = {step: arrived[step] - arrived[step - 1] for step in steps if step - 1 in arrived}
    written = [(float(m[1]), float(m[2])) for line in about_saves if (m := _WRITTEN.match(line))]
    near = {k for s in steps if s % interval == 0 for k in (s, s + 1, s + 2)}
    writing = {
        s
        for s in gaps
        for end, seconds in written
        if end - seconds <= arrived[s] - gaps[s] and arrived[s] <= end and s not in near
    }
    quiet = [gap for s, gap in gaps.items() if s > WARM and s not in near | writing]
    step_s = statistics.median(quiet)
    blocked = [
        arrived[s + 2] - arrived[s - 1] - 3 * step_s
        for s in steps
        if s % interval == 0 and s + 2 in arrived and s - 1 in arrived
    ]
    during = [gaps[s] for s in sorted(writing)]
    return {
        "step_s": step_s,
        "blocked_s": blocked,
        "write_s": [seconds for _, seconds in written],
        "steps_while_writing": len(during),
        "step_while_writing_s": statistics.median(during) if during else None,
        "step_while_writing_ratio": statistics.median(during) / step_s if during else None,
        "mean_while_writing_ratio": statistics.mean(during) / statistics.mean(quiet) if during else None,
        "gaps_s": gaps,
        "lines": about_saves,
    }


_WRITTEN = re.compile(
    r"([\d.]+) .*saved .*, ([\d.]+) s\)"
)  # titanlite's line: arrival time, seconds of the save


def load_case(options: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    """Save once, then load that checkpoint several times with and without verification."""
    options.steps = options.interval = 2
    command = titanlite_command(options, [*overrides, "--lr_scheduler.warmup_steps=1"])
    env = os.environ | {"NGPU": "1", "PYTHON": sys.executable}
    subprocess.run(command, env=env, check=True)
    times: list[dict[str, Any]] = []
    for cache in ("warm", "disk"):
        for verify in ("off", "full", "off", "full"):
            if cache == "disk":
                forget(options.folder)
            out = subprocess.run(
                [sys.executable, "-c", LOAD, str(options.folder), verify],
                env=os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
                check=True, capture_output=True, text=True,
            ).stdout  # fmt: skip
            times.append({"cache": cache, "verify": verify, **json.loads(out.splitlines()[-1])})
            print(times[-1], flush=True)
    best = {
        (cache, verify): min(
            t["open_s"] + t["load_s"] for t in times if (t["cache"], t["verify"]) == (cache, verify)
        )
        for cache in ("warm", "disk")
        for verify in ("off", "full")
    }
    added = {cache: best[cache, "full"] / best[cache, "off"] - 1 for cache in ("warm", "disk")}
    return {"verify_adds": added, "times": times}


def forget(folder: Path) -> None:
    """Drop a folder's files from the operating system's page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


LOAD = """
import json, sys, time, torch
from pathlib import Path
from types import SimpleNamespace
from titanlite.checkpoint import resume
from titanlite.checkpoint.checkpointer import Checkpointer, RunRecord
from titanlite.checkpoint.lock import FolderLock
from titanlite.ranks import Ranks
from titanlite.checkpoint.start import decide
from titanlite.checkpoint.state import TrainState
from titanlite.job import load_job
from titanlite.mesh import ALONE
from titanlite.metrics.guard import StepGuard
from titanlite.parallel.apply import parallelize
from titanlite.parallel.settings import ParallelSettings
folder, verify = Path(sys.argv[1]), sys.argv[2]
if verify == "off":
    resume.Verification = lambda *args: SimpleNamespace(result=lambda: None)
job = load_job(folder / "job.toml", world_size=None)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
with torch.device("meta"):
    net = job.model.build()
parallelize(net, job.loss, ALONE, ParallelSettings()).materialize(device, 0)
optimizer = job.optimizer.build(net, ALONE)
tokens = torch.zeros((), dtype=torch.int64, device=device)
state = TrainState(net, optimizer, tokens, StepGuard(job.guard, device), global_batch_size=1)
identity = json.loads((folder / "run_identity.json").read_text())
began = time.perf_counter()
lock = FolderLock(folder)
start = decide(job.checkpoint, folder, lock=lock)
checkpoints = Checkpointer(job.checkpoint, RunRecord(identity, ""), start, Ranks(folder), lock)
opened = time.perf_counter()
checkpoints.load(state)
if device.type == "cuda":
    torch.cuda.synchronize()
print(json.dumps({"open_s": opened - began, "load_s": time.perf_counter() - opened, "step": state.step}))
"""

if __name__ == "__main__":
    main()
