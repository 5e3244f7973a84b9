"""Tensor and context parallel over NCCL: the losses of one GPU, eager in fp32 and compiled in bf16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.test_cuda import column, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
# Heads and rows large enough for the kernels; of fused attention there is none for fp32 with fewer key heads.
ROWS = ["--training.seq_len=256", "--data.holdout_rows=0", "--model.overrides.head_dim=16"]
ROWS += ["--training.global_batch_size=4"]
FP32 = [*ROWS, "--training.mixed_precision_param=float32"]
MASKED = ["--data.packing=best_fit", "--data.mask_documents=true"]
TENSOR = "--parallelism.tensor_parallel_degree=2"
CONTEXT = "--parallelism.context_parallel_degree=2"


@pytest.mark.parametrize("layout", [TENSOR, CONTEXT], ids=["tensor", "context"])
@pytest.mark.parametrize("masked", [[], MASKED], ids=["causal", "masked"])
def test_two_gpus_on_the_same_rows_equal_one(
    tmp_path: Path, corpus: Path, layout: str, masked: list[str]
) -> None:
    math = [] if masked else ["--attention.sdpa_kernel=math"]
    one = run(tmp_path, corpus, *FP32, *masked, *math, name="one")
    kernel = math if layout == TENSOR else []  # context parallel has kernels of its own
    two = run(tmp_path, corpus, *FP32, *masked, *kernel, layout, ngpu=2, name="two")
    assert column(two, "data/batch_sha") == column(one, "data/batch_sha")
    for key in ("train/loss", "train/grad_norm"):
        assert column(two, key) == pytest.approx(column(one, key), rel=1e-4)


@pytest.mark.parametrize("layout", [TENSOR, CONTEXT], ids=["tensor", "context"])
def test_compiled_in_bf16_they_train_alike_and_resume_on_one(
    tmp_path: Path, corpus: Path, layout: str
) -> None:
    fast = [*ROWS, *MASKED, "--compile.enable"]
    one = run(tmp_path, corpus, *fast, name="one")
    two = run(tmp_path, corpus, *fast, layout, ngpu=2, name="two")
    assert column(two, "train/loss") == pytest.approx(column(one, "train/loss"), rel=5e-3)  # bf16 rounding
    run(tmp_path, corpus, *fast, layout, "--training.steps=4", ngpu=2, name="across")
    across = run(tmp_path, corpus, *fast, name="across")
    assert column(across, "train/loss") == pytest.approx(column(one, "train/loss"), rel=5e-3)
