"""Runs on one or more GPUs, through run_train.sh."""

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
from typing import Any

import torch

from tests.support.jobs import ROOT, make_job, metrics_of, write_toml
from tests.support.runs import FOUR_MICRO_BATCHES


def trained(
    folder: Path,
    corpus: Path,
    *overrides: str,
    name: str = "run",
    program: list[str] | None = None,
    code: int = 0,
    **environment: str,
) -> str:
    """The stderr of the base job, which must end with exit code `code`. Runs `program`, or run_train.sh.
    Modules in `folder` can be imported."""
    folder.mkdir(parents=True, exist_ok=True)
    where = [f"--job.dump_folder={folder / name}", f"--data.cache_dir={corpus / 'cache'}"]
    command = [
        *(program or [str(ROOT / "run_train.sh")]),
        str(write_toml(folder, corpus)),
        *where,
        FOUR_MICRO_BATCHES,
        *overrides,
    ]
    path = f"{folder}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    env = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": path} | environment
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done.stderr


def run(folder: Path, corpus: Path, *overrides: str, ngpu: int = 1, name: str = "run") -> list[dict]:
    """Run the base job through run_train.sh. Returns its metrics."""
    trained(folder, corpus, *overrides, name=name, NGPU=str(ngpu))
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
