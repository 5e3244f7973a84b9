"""Runs on one or more GPUs, through run_train.sh."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


def column(metrics: list[dict], key: str) -> list[float]:
    """The values of one metric, by step."""
    return [row[key] for row in metrics]


def shards(run_folder: Path, step: int) -> dict[str, bytes]:
    """The files of weights and optimizer state in a checkpoint of a run."""
    return {p.name: p.read_bytes() for p in run_folder.glob(f"checkpoint/step-{step}/*.distcp")}
