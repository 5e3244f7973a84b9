"""`titanlite verify-resume CONFIG --ranks=1,2,4 [--steps=N]`: compare a run that is stopped and resumed on
other numbers of ranks with a run that is not, by the digests of their weights after each step.

Both train the job's model on its data, in a temporary folder and without trackers."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from titanlite.checkpoint import commit
from titanlite.checkpoint.reader import read_metadata, read_tensor
from titanlite.checkpoint.state_digest import combine, digests_of_checkpoint
from titanlite.config.component import ConfigError
from titanlite.job import load_job
from titanlite.lab.cards import GIB
from titanlite.lab.trial_runs import LOOK_S, RunFailed, end_runs, last_line, start_run, stoppable
from titanlite.lab.verbs import verify_resume_arguments
from titanlite.log import set_up_logging, tell
from titanlite.report.recorded_run import read_run
from titanlite.runtime.signals import Stopped, StopRequests
from titanlite.table import table

END_S = 120.0  # for a run to save after SIGTERM, before it is killed
STOPPED_S = 10.0  # the same, when nobody wants what it saves
STATE_BYTES = 12  # of AdamW per parameter: weight and two moments
OWN = [
    "--checkpoint.enable=true",
    "--checkpoint.folder=checkpoint",
    "--checkpoint.load_step=-1",
    "--checkpoint.restart=false",
    "--checkpoint.interval=1",
    "--checkpoint.keep_latest_k=0",
    "--guard.on_spike=log",
    "--validation.enable=false",
    "--generation.prompts=[]",
    "--profiling.enable_profiling=false",
    "--metrics.sinks=[]",
    "--metrics.log_freq=1",
]


def main(argv: Sequence[str]) -> int:
    """Train both runs, and print a line per step. Returns 1 if the job has
    training.same_bits_on_any_ranks, and the weights differ; else 0. Raises ConfigError, Stopped and
    RunFailed."""
    options, overrides = verify_resume_arguments(argv)
    set_up_logging(rank=0, verbose=False)
    jobs = [load_job(options.config, overrides, n, allow_imports=True) for n in options.ranks]
    job = jobs[0]
    uses_gpus = options.device != "cpu" and torch.cuda.is_available()
    if uses_gpus and max(options.ranks) > (gpus := torch.cuda.device_count()):
        raise ConfigError(f"command line, --ranks: {max(options.ranks)}, but there are {gpus} GPUs")
    if job.training.steps < options.steps:
        raise ConfigError(
            f"{job.training.steps} is below the --steps={options.steps} to train", "training.steps"
        )
    size = sum(p.numel() for p in job.build_on_meta().parameters()) * STATE_BYTES
    tell(
        f"two runs of {options.steps} steps or a few more, with a checkpoint after each step: about "
        f"{2 * options.steps * size / GIB:.1f} GiB of disk in {tempfile.gettempdir()}"
    )
    with tempfile.TemporaryDirectory(prefix="titanlite-verify-") as name, stoppable() as requests:
        folder, resumed = Path(name), Path(name, "resumed")
        runs = _Runs(folder, [options.config, *overrides], "" if uses_gpus else "-1", requests)
        for num_ranks, end in parts(options.ranks, options.steps):
            before, began = _last_step(resumed), time.monotonic()
            runs.train("resumed", num_ranks, max(end, before + 1))
            tell(
                f"steps {before + 1} to {_last_step(resumed)} on {_ranks(num_ranks)} took "
                f"{time.monotonic() - began:.0f} s"
            )
        runs.train("whole", options.ranks[0], _last_step(resumed))
        are_equal = _compare(folder, _last_step(resumed))
    return 0 if are_equal or not job.training.same_bits_on_any_ranks else 1


def parts(ranks: Sequence[int], steps: int) -> list[tuple[int, int]]:
    """The parts of the run that is resumed, at least two: the number of ranks, and the last step. A part that
    is stopped late ends at a later step."""
    others = list(ranks[1:] or ranks)
    others *= 2 if len(others) == 1 else 1
    return [(n, steps * (i + 1) // len(others)) for i, n in enumerate(others)]


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


class _Runs:
    """Runs in `folder`. `gpus`: the ids of their GPUs, as CUDA_VISIBLE_DEVICES has them; empty: all."""

    def __init__(self, folder: Path, arguments: Sequence[str], gpus: str, requests: StopRequests):
        self._folder, self._arguments, self._gpus, self._requests = folder, arguments, gpus, requests

    def train(self, name: str, num_ranks: int, last_step: int) -> None:
        """Train a run until a step is saved, and stop it as a scheduler does. Raises Stopped, and RunFailed
        with the last line of its log."""
        run, log = self._folder / name, self._folder / "log"
        own = [f"--job.dump_folder={run}", *OWN]
        process = start_run([*self._arguments, *own], num_ranks, self._gpus, log)
        try:
            while process.poll() is None and not self._requests.stop and _last_step(run) < last_step:
                time.sleep(LOOK_S)
        finally:
            end_runs([process], STOPPED_S if self._requests.stop else END_S)
        if self._requests.stop:
            raise Stopped("stopped; the runs have ended, and nothing is left of them")
        if process.returncode not in (0, Stopped.exit_code) or _last_step(run) < last_step:
            ended = f"the run on {_ranks(num_ranks)} ended with exit code {process.returncode}"
            raise RunFailed(f"{ended}{last_line(log)}")


def _last_step(run: Path) -> int:
    return max((step for step, _ in commit.list_committed(run / "checkpoint")), default=0)


class _Step(NamedTuple):
    """The checkpoints of one step in both runs."""

    whole: Path
    resumed: Path

    @property
    def row(self) -> list[str]:
        """Ranks and digests."""
        manifests = [commit.read_manifest(path) for path in self]
        texts = [combine(digests_of_checkpoint(path))["weights"][:16] for path in self]
        cells = [f"{text} ({_ranks(m['ranks'])})" for text, m in zip(texts, manifests)]
        return [*cells, "equal" if texts[0] == texts[1] else "differ"]


def _compare(folder: Path, steps: int) -> bool:
    """Print a table of the steps. Returns whether all weights are equal."""
    rows, unequal = [["step", "weights of the whole run", "of the resumed run", ""]], list[int]()
    paths = {
        step: _Step(*(folder / name / f"checkpoint/step-{step}" for name in ("whole", "resumed")))
        for step in range(1, steps + 1)
    }
    for step, pair in paths.items():
        rows.append([str(step), *pair.row])
        if rows[-1][-1] == "differ":
            unequal.append(step)
    print(table(rows))
    losses = [
        {record["step"]: record["train/loss"] for record in read_run(folder / name, name).records}
        for name in ("whole", "resumed")
    ]
    loss = max(abs(losses[1][step] - losses[0][step]) / abs(losses[0][step]) for step in paths)
    if not unequal:
        print(f"equal bits of weights in {steps} steps; largest relative difference of losses: {loss:.1e}")
        return True
    name, weights = _largest_difference(paths[unequal[-1]])
    differing = _differing(paths[unequal[0]])
    print(
        f"the weights differ from step {unequal[0]} on, first in {differing[0]}; largest relative difference "
        f"of losses: {loss:.1e}, of a tensor of weights after step {unequal[-1]}: {weights:.1e} ({name})"
    )
    return False


def _differing(step: _Step) -> list[str]:
    """The tensors of the weights that differ."""
    whole, resumed = (digests_of_checkpoint(path) for path in step)
    return [name for name in whole if name.startswith("model.") and whole[name] != resumed[name]]


def _largest_difference(step: _Step) -> tuple[str, float]:
    """The tensor with the largest difference, relative to its norm, and this difference."""
    by_name = {}
    for name in _differing(step):
        whole, resumed = (read_tensor(path, name, read_metadata(path)).double() for path in step)
        by_name[name] = ((resumed - whole).norm() / whole.norm().clamp(min=1e-30)).item()
    return max(by_name.items(), key=lambda item: item[1])
