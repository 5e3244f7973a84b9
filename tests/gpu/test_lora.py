"""Adapters on a GPU: the memory that frozen weights save, and training with the compiler."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.gpu import column, run
from tests.support.jobs import make_job, metrics_of
from tests.support.runs import UNTIED
from titanlite.job import Job
from titanlite.models.base import Decoder
from titanlite.train import train

pytestmark = pytest.mark.gpu
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
SHAPE = "{dim = 1024, n_layers = 8, n_heads = 16, head_dim = 64, hidden_dim = 4096, vocab_size = 258}"
GIB = 1 << 30


def num_parameters(net: Decoder) -> int:
    return sum(p.numel() for p in net.parameters())


def peak_gib(job: Job) -> float:
    return max(step["memory/peak_allocated_gib"] for step in metrics_of(job)[1:])


@pytest.mark.parametrize("options", [[], ["--compile.enable"]], ids=str)
def test_frozen_weights_have_no_gradients_and_no_optimizer_state(
    tmp_path: Path, corpus: Path, options: list[str]
) -> None:
    keys = [f"--model.overrides={SHAPE}", "--training.steps=3", *options]
    full = make_job(tmp_path, corpus, *keys, name="full")
    train(full)
    keys += [f"--checkpoint.initial_load_path={full.folder / 'checkpoint/step-3'}", "--training.steps=12"]
    keys += ["--lora.enable", "--lora.rank=8"]
    lora = make_job(tmp_path, corpus, *keys, "--optimizer.lr=0.01", name="lora")
    train(lora)
    control = make_job(tmp_path, corpus, *keys, "--optimizer.lr=1e-12", name="control")
    train(control)
    weights_gib = 4 * num_parameters(full.model.build_on_meta()) / GIB
    assert peak_gib(full) > 4 * weights_gib  # weights, gradients and two moments
    assert peak_gib(lora) < peak_gib(full) - 2.8 * weights_gib
    losses = column(metrics_of(lora), "train/loss")
    untrained = column(metrics_of(control), "train/loss")  # on the same sequences, of the base model alone
    assert losses[0] == pytest.approx(untrained[0], abs=1e-5)
    assert min(losses) < min(untrained) - 0.5  # the lowest: at this rate, in single steps, losses also rise


@pytest.fixture(scope="module")
def one_gpu(
    tmp_path_factory: pytest.TempPathFactory, corpus: Path
) -> tuple[list[str], list[float], list[float]]:
    """The keys of adapters on a base model, their losses on one GPU, and those of untrained adapters."""
    folder = tmp_path_factory.mktemp("one_gpu")
    keys = [UNTIED, "--training.mixed_precision_param=float32", "--training.steps=6"]
    run(folder, corpus, *keys, name="base")
    keys += [f"--checkpoint.initial_load_path={folder / 'base'}", "--lora.enable", "--optimizer.lr=0.02"]
    whole = column(run(folder, corpus, *keys, name="whole"), "train/loss")
    control = run(folder, corpus, *keys, "--optimizer.lr=1e-12", name="control")
    return keys, whole, column(control, "train/loss")


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["--compile.enable", "--activation_checkpoint.mode=full"],
        ["--parallelism.tensor_parallel_degree=2"],
        ["--parallelism.tensor_parallel_degree=2", "--compile.enable"],
        ["--parallelism.context_parallel_degree=2"],
        ["--parallelism.pipeline_parallel_degree=2"],
    ],
    ids=str,
)
@TWO
def test_two_gpus_train_as_one(
    tmp_path: Path, corpus: Path, one_gpu: tuple[list[str], list[float], list[float]], overrides: list[str]
) -> None:
    keys, whole, untrained = one_gpu
    losses = column(run(tmp_path, corpus, *keys, *overrides, ngpu=2), "train/loss")
    assert losses == pytest.approx(whole, abs=2e-3)
    assert losses[1:] != pytest.approx(untrained[1:], abs=2e-2)
