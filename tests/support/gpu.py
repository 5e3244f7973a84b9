"""Runs on one or more GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NoReturn

import torch

from tests.support.jobs import ROOT, make_job, metrics_of, write_toml
from tests.support.ranks import Ranks, leave, write_output_to
from tests.support.runs import FOUR_MICRO_BATCHES
from titanlite import cli

QWEN3_5 = [  # a model with linear attention in every second layer
    "--model.name=qwen3_5",
    "--data.holdout_sequences=0",
    *(
        f"--model.overrides.{key}={value}"
        for key, value in {
            "n_layers": 4, "layer_pattern": "DL", "head_dim": 16, "delta_n_k_heads": 2, "delta_n_v_heads": 4,
            "delta_k_head_dim": 32, "delta_v_head_dim": 32,
        }.items()
    ),
]  # fmt: skip
LAUNCHER = [str(ROOT / "run_train.sh")]


def trained(
    folder: Path,
    corpus: Path,
    *overrides: str,
    name: str = "run",
    program: list[str] | None = None,
    code: int = 0,
    ngpu: int = 1,
    **environment: str,
) -> str:
    """The log of the base job, which must end with exit code `code`. Modules in `folder` can be imported.
    With `program`, runs that. Otherwise the ranks are copies of a process that has imported titanlite: the
    imports take longer than the run."""
    folder.mkdir(parents=True, exist_ok=True)
    where = [f"--job.dump_folder={folder / name}", f"--data.cache_dir={corpus / 'cache'}"]
    job = [str(write_toml(folder, corpus)), *where, FOUR_MICRO_BATCHES, *overrides]
    path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {"PYTHON": sys.executable, "PYTHONPATH": path, **environment}
    if program is None:
        (log := folder / f"{name}.log").unlink(missing_ok=True)
        words = ["titanlite", "train", *job]
        exits = Ranks(ngpu, _train, words, folder, log, environment, gpus=True).exits()
        returned = next((exit_code for exit_code in exits if exit_code), 0)
        text = log.read_text()
    else:
        env = os.environ | {"NGPU": str(ngpu)} | environment
        done = subprocess.run([*program, *job], env=env, capture_output=True, text=True, check=False)
        returned, text = done.returncode, done.stderr
    assert returned == code, text
    return text


def _train(words: list[str], folder: Path, log: Path, environment: dict[str, str]) -> NoReturn:
    """Run the program `titanlite` in this process, which ends with it. `words`: sys.argv."""
    write_output_to(log)
    os.environ.update(environment)
    sys.path.insert(0, str(folder))
    sys.argv = words
    leave(cli.main())


def run(folder: Path, corpus: Path, *overrides: str, ngpu: int = 1, name: str = "run") -> list[dict]:
    """Run the base job on `ngpu` ranks. Returns its metrics."""
    trained(folder, corpus, *overrides, name=name, ngpu=ngpu)
    return metrics_of(make_job(folder, corpus, FOUR_MICRO_BATCHES, *overrides, name=name, world_size=ngpu))


_numbers = count()


@cache
def reference(corpus: Path, *overrides: str) -> list[dict]:
    """The metrics of a run on one GPU, with which several tests compare theirs. Runs once per process."""
    return run(corpus / f"reference-{next(_numbers)}", corpus, *overrides)


def on_two_gpus(folder: Path, function: Callable[..., Any], *args: Any) -> list[Any]:
    """The results of `function(rank, *args)` on two ranks with NCCL. The ranks are spawned: copies of a
    process that has used CUDA, as those of `run_on` are, could not use it. Tensors have to come back as
    numpy arrays."""
    (store := folder / "ranks").mkdir()
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        ranks = [pool.submit(_on_gpu, rank, store, function, args) for rank in range(2)]
        return [rank.result(timeout=300) for rank in ranks]


def _on_gpu(rank: int, folder: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    return function(rank, *args)


def column(metrics: list[dict], key: str) -> list[float]:
    """The values of one metric, by step."""
    return [row[key] for row in metrics]


def shards(run_folder: Path, step: int) -> dict[str, bytes]:
    """The files of weights and optimizer state in a checkpoint of a run."""
    return {p.name: p.read_bytes() for p in run_folder.glob(f"checkpoint/step-{step}/*.distcp")}
