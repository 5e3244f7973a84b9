"""Probes on GPUs: compiled, with every kernel for document masks, over NCCL. Training is the same without
them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.gpu import column, reference, run

pytestmark = pytest.mark.gpu
STEPS = "--training.steps=4"
PROBE = "--metrics.probe_freq=2"
BASE = [
    *("--data.holdout_sequences=0", "--model.overrides.head_dim=16", "--training.global_batch_size=4"),
    *("--training.seq_len=256", "--model.overrides.tie_word_embeddings=false", STEPS),
    "--optimizer.lr=1e-5",  # Adam's first steps are signs of gradients, which rounding may flip
]
MASKED = ["--data.packing=best_fit", "--data.mask_documents=true"]
DENSE = ["--attention.backend=sdpa", "--attention.sdpa_kernel=math"]  # the kernel that takes every dense mask
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def table(folder: Path, name: str) -> list[list[float]]:
    """The numbers of the last probe, by block."""
    last = json.loads((folder / name / "probe.jsonl").read_text().splitlines()[-1])
    return [
        [b["residual_rms"], b["residual_max"], *b["attention_logit_max"], *b["attention_entropy"]]
        for b in last["blocks"]
    ]


def weights(folder: Path, name: str) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in (folder / name).glob("checkpoint/step-4/*.distcp")}


def assert_near(actual: list[list[float]], wanted: list[list[float]], rel: float) -> None:
    assert len(actual) == len(wanted) == 2
    for ours, theirs in zip(actual, wanted):
        assert ours == pytest.approx(theirs, rel=rel)


@pytest.mark.parametrize("compiled", [[], ["--compile.enable"]], ids=["eager", "compiled"])
@pytest.mark.parametrize("backend", ["sdpa", "flex", "varlen", "causal"])
def test_training_is_the_same_with_and_without_probes(
    tmp_path: Path, corpus: Path, backend: str, compiled: list[str]
) -> None:
    kernel = DENSE if backend == "sdpa" else [f"--attention.backend={backend}"]
    masked = [] if backend == "causal" else [*MASKED, *kernel]
    keys = [*BASE, *masked, *compiled]
    plain = run(tmp_path, corpus, *keys, name="plain")
    probed = run(tmp_path, corpus, *keys, PROBE, name="probed")
    for key in ("train/loss", "train/grad_norm"):
        assert column(probed, key) == column(plain, key)
    assert weights(tmp_path, "probed") == weights(tmp_path, "plain") != {}
    assert [line["step"] for line in probed if "probe/attention_logit_max" in line] == [1, 2, 4]
    if masked and backend != "sdpa":
        dense = [*BASE, *MASKED, *DENSE, *compiled, PROBE]
        run(tmp_path, corpus, *dense, name="dense")
        assert_near(table(tmp_path, "probed"), table(tmp_path, "dense"), rel=0.05)
        unmasked = reference(corpus, *BASE, "--data.packing=best_fit", *compiled, PROBE)
        entropy = "probe/attention_entropy_min"
        # Control: without masks the queries see several documents, which raises their entropy.
        assert probed[-1][entropy] < unmasked[-1][entropy] - 0.2


@TWO
@pytest.mark.parametrize(
    ("layout", "masked"),
    [("tensor", MASKED), ("context", []), ("context", MASKED), ("pipeline", []), ("data", MASKED)],
    ids=["tensor-masked", "context-causal", "context-masked", "pipeline-causal", "data-masked"],
)
def test_two_gpus_have_the_statistics_of_one(
    tmp_path: Path, corpus: Path, layout: str, masked: list[str]
) -> None:
    fp32 = [*BASE, *masked, "--training.mixed_precision_param=float32", PROBE]
    degree = [] if layout == "data" else [f"--parallelism.{layout}_parallel_degree=2"]
    # Both runs have the same four sequences in the first micro-batch, or two of four.
    size = "--training.local_batch_size=2"
    one = [size] if degree else ["--training.local_batch_size=4"]
    run(tmp_path, corpus, *fp32, *one, name="one")
    run(tmp_path, corpus, *fp32, size, *degree, ngpu=2, name="two")
    assert_near(table(tmp_path, "two"), table(tmp_path, "one"), rel=1e-3)
