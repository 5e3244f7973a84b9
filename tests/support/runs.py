"""Runs of the tiny job, on ranks or in several starts, and comparisons of two runs."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import shards
from tests.support.jobs import make_job, metrics_of
from titanlite.checkpoint.reader import load_tensors
from titanlite.checkpoint.state import model_tensors
from titanlite.job import Job
from titanlite.train import train

KEYS = (
    "step",
    "train/loss",
    "train/grad_norm",
    "data/batch_sha",
    "progress/total_tokens",
    "train/learning_rate",
)


def history(job: Job) -> list[list[object]]:
    """The values that must be equal at every step."""
    return [[row[key] for key in KEYS] for row in metrics_of(job)]


def weights_sha(job: Job, step: int) -> str:
    """Hash of the final weights, read back from the checkpoint."""
    net = job.model.build()
    load_tensors(job.folder / f"checkpoint/step-{step}", {"model": model_tensors(net)})
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest()


def weights(job: Job, step: int) -> dict[str, torch.Tensor]:
    """The weights in a checkpoint, read by one process, which checks names, shapes and dtypes."""
    net = job.model.build()
    load_tensors(job.folder / f"checkpoint/step-{step}", {"model": model_tensors(net)})
    return {name: p.detach() for name, p in net.named_parameters()}


def run_in_hops(folder: Path, corpus: Path, hops: list[int], *overrides: str, name: str = "hops") -> Job:
    """Train to each step of `hops` in turn, each time with a new start of the program's state."""
    for steps in hops:
        job = make_job(folder, corpus, f"--training.steps={steps}", *overrides, name=name)
        train(job)
    return job


UNTIED = "--model.overrides.tie_word_embeddings=false"


def train_on_rank(folder: Path, corpus: Path, overrides: list[str], name: str, world_size: int) -> None:
    """Train on one rank of a run."""
    train(make_job(folder, corpus, *overrides, name=name, world_size=world_size))


TP = "--parallelism.tensor_parallel_degree=2"
CP = "--parallelism.context_parallel_degree=2"
FOUR_MICRO_BATCHES = "--training.local_batch_size=2"  # with a global batch of 8, which four ranks can share
PP = "--parallelism.pipeline_parallel_degree=2"


def assert_same_run(job: Job, whole: Job, steps: int = 12) -> None:
    ours, theirs = metrics_of(job), metrics_of(whole)[:steps]
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    for a, b in zip(ours, theirs):
        assert a["data/batch_sha"] == b["data/batch_sha"]
        assert a["progress/total_tokens"] == b["progress/total_tokens"]
        assert a["train/loss"] == pytest.approx(b["train/loss"], abs=1e-5)
        assert a["train/grad_norm"] == pytest.approx(b["train/grad_norm"], rel=1e-5)


def state_of(job: Job, step: int) -> dict[str, str]:
    """SHA-256 of the weights and optimizer state that a run saved: equal states have equal bytes."""
    return shards(job.folder / f"checkpoint/step-{step}")


def assert_same(job: Job, whole: Job) -> None:
    """Two runs on one layout are equal to the bit: the log of every step, and the last state."""
    steps = history(whole)
    assert history(job) == steps
    last = len(steps)
    assert state_of(job, last) == state_of(whole, last) != {}
