"""training.same_bits_on_any_ranks on CUDA: one GPU and two have the same digests of weights and state at each
saved step, compiled and in bf16; without the key they differ."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.gpu import column, run
from titanlite.checkpoint import commit
from titanlite.checkpoint.state_digest import combine, digests_of_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
ON = "--training.same_bits_on_any_ranks"
KEYS = [
    "--training.mixed_precision_param=bfloat16",
    "--training.local_batch_size=2",
    "--training.global_batch_size=8",
    "--training.steps=6",
    "--lr_scheduler.total_steps=6",
    "--checkpoint.interval=3",
]
VARIANTS = {
    "eager": [],
    "compiled": ["--compile.enable"],
    "muon": ["--optimizer.name=muon", "--compile.enable"],
    "int8": ["--optimizer.state_dtype=int8"],
    "activation checkpointing": ["--activation_checkpoint.mode=full", "--ema.enable"],
}


def digests(folder: Path) -> dict[int, dict[str, str]]:
    """The digests of all checkpoints of a run, from their files."""
    paths = commit.list_committed(folder / "run/checkpoint")
    return {step: combine(digests_of_checkpoint(path)) for step, path in paths}


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_gpus_have_the_bits_of_one(tmp_path: Path, corpus: Path, variant: str) -> None:
    rows = {n: run(tmp_path / f"{n}", corpus, *KEYS, ON, *VARIANTS[variant], ngpu=n) for n in (1, 2)}
    assert digests(tmp_path / "1") == digests(tmp_path / "2")
    for key in ("train/loss", "train/grad_norm"):
        assert column(rows[1], key) == column(rows[2], key)
    for step, path in commit.list_committed(tmp_path / "2/run/checkpoint"):
        assert commit.read_manifest(path)["digest"] == digests(tmp_path / "2")[step]


def test_control_without_the_key_bits_differ(tmp_path: Path, corpus: Path) -> None:
    for n in (1, 2):
        run(tmp_path / f"{n}", corpus, *KEYS, "--training.deterministic", ngpu=n)
    assert digests(tmp_path / "1") != digests(tmp_path / "2")
