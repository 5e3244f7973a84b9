"""What `titanlite config --ranks` accepts trains on so many ranks, with the shards that its dry run states;
what it refuses, training refuses with the same error."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import ranks
from tests.support.jobs import make_job
from titanlite.checkpoint.lock import FolderLock
from titanlite.config.component import ConfigError
from titanlite.job import Job
from titanlite.mesh import local_shard
from titanlite.parallel.dry_run import model_of_rank
from titanlite.runtime.runtime import runtime
from titanlite.runtime.signals import stop_requests
from titanlite.tools.config import build_on_meta, check_inputs, check_layout
from titanlite.train import build, take_steps

CHOICES: dict[str, list[Any]] = {
    "training.seq_len": [32, 32, 48, 36],
    "training.local_batch_size": [1, 1, 2],
    "training.global_batch_size": [8, 16, 12],
    "training.clip": ["global", "tensor"],
    "model.overrides.n_layers": [2, 3, 4, 8],
    "model.overrides.n_heads": [4, 4, 8],
    "model.overrides.n_kv_heads": [2, 4],
    "model.overrides.dim": [32, 40],
    "model.overrides.hidden_dim": [64, 100],
    "model.overrides.vocab_size": [264, 264, 259],
    "model.overrides.tie_word_embeddings": ["false", "false", "true"],
    "optimizer.name": ["adamw", "muon"],
    "activation_checkpoint.mode": ["none", "none", "full", "selective"],
    "parallelism.pipeline_parallel_schedule": [
        "1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble",
    ],
    "parallelism.fsdp_reduce": ["step", "step", "step", "micro_batch"],
    "parallelism.fsdp_reshard_after_forward": ["default", "always", "never"],
    "training.enable_cpu_offload": ["false", "false", "false", "true"],
}  # fmt: skip
AXES = ("data_parallel_replicate", "context_parallel", "tensor_parallel", "pipeline_parallel")


def sample(seed: int) -> tuple[int, list[str]]:
    """A number of ranks and a layout on them, which may break rules: two in five do."""
    rng = random.Random(seed)
    num_ranks = left = rng.choice([2, 4, 4, 8])
    degrees = dict.fromkeys(AXES, 1)
    while left > 1 and rng.random() < 0.8:
        degrees[rng.choice(AXES)] *= 2
        left //= 2
    keys = [f"--parallelism.{axis}_degree={degree}" for axis, degree in degrees.items()]
    return num_ranks, keys + [f"--{key}={rng.choice(values)}" for key, values in CHOICES.items()]


def checked(job: Job, num_ranks: int) -> None:
    """What `titanlite config --ranks` does. Raises ConfigError."""
    job.check(num_ranks)
    check_inputs(job, num_ranks)
    build_on_meta(job)
    check_layout(job, num_ranks, 8)


def trained(folder: Path, corpus: Path, keys: list[str]) -> int:
    """Train on this rank as titanlite.train does. Returns the number of elements of the rank's shards."""
    job = make_job(folder, corpus, *keys, world_size=dist.get_world_size())
    with (
        stop_requests() as requests,
        runtime(job.training, job.parallelism, job.comm, job.folder) as rt,
        FolderLock(job.folder) as lock,
        build(job, rt, lock) as run,
        run.profiler() as profiler,
    ):
        num_elements = sum(local_shard(p).numel() for p in run.model.net.parameters())
        assert take_steps(run, requests, profiler) == 0
        return num_elements


def refused(folder: Path, corpus: Path, keys: list[str]) -> str:
    """The error that ends training on this rank before its first step, or nothing."""
    try:
        trained(folder, corpus, keys)
    except ConfigError as e:
        return str(e)
    return ""


QUICK = ["--training.steps=2", "--lr_scheduler.warmup_steps=1", "--checkpoint.interval=2"]


@pytest.mark.full
@pytest.mark.parametrize("seed", range(50))
def test_a_sampled_layout(seed: int, tmp_path: Path, corpus: Path) -> None:
    num_ranks, keys = sample(seed)
    keys += QUICK
    job, refusal = make_job(tmp_path, corpus, *keys, world_size=None), ""
    try:
        checked(job, num_ranks)
    except ConfigError as e:
        refusal = str(e)
    if refusal:
        errors = ranks.run(num_ranks, refused, tmp_path, corpus, keys)
        assert all(error.endswith(refusal) for error in errors), errors
        return
    settings = job.parallel_settings(torch.float32)
    wanted = [
        model_of_rank(job.build_on_meta(), job.loss, settings, rank, num_ranks).num_parameters
        for rank in range(num_ranks)
    ]
    assert ranks.run(num_ranks, trained, tmp_path, corpus, keys) == wanted


def failure(folder: Path, corpus: Path, keys: list[str]) -> str:
    """The error that ends training on this rank if the rules are not checked, or nothing."""
    job = make_job(folder, corpus, *keys, world_size=None)
    try:
        with (
            stop_requests() as requests,
            runtime(job.training, job.parallelism, job.comm, job.folder) as rt,
            FolderLock(job.folder) as lock,
        ):
            run = build(job, rt, lock)
            take_steps(run, requests, run.profiler())
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return ""


# Layouts that fail in real process groups, and the rule that refuses them.
FAILING = {
    "is not divisible by 4: each rank needs its own key": ["--parallelism.tensor_parallel_degree=4"],
    "a sequence length of 34": ["--parallelism.context_parallel_degree=4", "--training.seq_len=34"],
    "12 sequences are not a multiple": ["--training.global_batch_size=12"],
    "2 blocks over 4 stages": ["--parallelism.pipeline_parallel_degree=4"],
}


@pytest.mark.full
@pytest.mark.parametrize("message", FAILING)
def test_what_fails_on_real_ranks_is_refused(message: str, tmp_path: Path, corpus: Path) -> None:
    keys = [*QUICK, "--model.overrides.tie_word_embeddings=false", *FAILING[message]]
    with pytest.raises(ConfigError, match=message):
        checked(make_job(tmp_path, corpus, *keys, world_size=None), 4)
    assert all(ranks.run(4, failure, tmp_path, corpus, keys))


@pytest.mark.full
def test_control_a_layout_that_is_accepted_does_not_fail_on_real_ranks(tmp_path: Path, corpus: Path) -> None:
    keys = [*QUICK, "--model.overrides.tie_word_embeddings=false", "--parallelism.tensor_parallel_degree=2"]
    assert ranks.run(4, failure, tmp_path, corpus, keys) == [""] * 4
