"""Tensor, context and pipeline parallel over NCCL have the losses of one GPU, eager in fp32 and compiled in
bf16. CPU offload has them, too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.support.gpu import QWEN3_5, column, reference, run, trained
from tests.support.jobs import make_job, metrics_of

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
# Heads and sequences are large enough for the kernels.
LARGE = ["--training.seq_len=256", "--data.holdout_sequences=0", "--model.overrides.head_dim=16"]
LARGE += ["--training.global_batch_size=4", "--model.overrides.tie_word_embeddings=false"]
FP32 = [*LARGE, "--training.mixed_precision_param=float32"]
MASKED = ["--data.packing=best_fit", "--data.mask_documents=true"]
TP = "--parallelism.tensor_parallel_degree=2"
CP = "--parallelism.context_parallel_degree=2"
PP = "--parallelism.pipeline_parallel_degree=2"
SCHEDULE = "--parallelism.pipeline_parallel_schedule="
FLOAT8 = ["--float8.enable", "--float8.recipe="]
LAYOUTS = pytest.mark.parametrize("layout", [TP, CP, PP], ids=["tp", "cp", "pp"])
BLOCKS = ["--model.overrides.n_layers=4"]


def assert_same(two: list, one: list, rel: float) -> None:
    assert column(two, "data/batch_sha") == column(one, "data/batch_sha")
    for key in ("train/loss", "train/grad_norm"):
        assert column(two, key) == pytest.approx(column(one, key), rel=rel)


@two_gpus
@LAYOUTS
@pytest.mark.parametrize("masked", [[], MASKED], ids=["causal", "masked"])
def test_two_gpus_on_the_same_sequences_equal_one(
    tmp_path: Path, corpus: Path, layout: str, masked: list[str]
) -> None:
    two = run(tmp_path, corpus, *FP32, *masked, layout, ngpu=2)
    assert_same(two, reference(corpus, *FP32, *masked), 1e-4)


@two_gpus
@LAYOUTS
def test_linear_attention_on_two_gpus_equals_one(tmp_path: Path, corpus: Path, layout: str) -> None:
    keys = [*FP32, *MASKED, *QWEN3_5]
    assert_same(run(tmp_path, corpus, *keys, layout, ngpu=2), reference(corpus, *keys), 1e-4)


@two_gpus
@pytest.mark.parametrize("schedule", ["GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"])
def test_every_schedule_equals_one_gpu(tmp_path: Path, corpus: Path, schedule: str) -> None:
    two = run(tmp_path, corpus, *FP32, *BLOCKS, PP, SCHEDULE + schedule, ngpu=2)
    assert_same(two, reference(corpus, *FP32, *BLOCKS), 1e-4)


@two_gpus
@LAYOUTS
def test_compiled_in_bf16_they_train_alike_and_resume_on_one(
    tmp_path: Path, corpus: Path, layout: str
) -> None:
    fast = [*LARGE, *MASKED, "--compile.enable"]
    one = reference(corpus, *fast)
    two = run(tmp_path, corpus, *fast, layout, ngpu=2, name="two")
    assert column(two, "train/loss") == pytest.approx(column(one, "train/loss"), rel=5e-3)  # bf16 rounding
    run(tmp_path, corpus, *fast, layout, "--training.steps=4", ngpu=2, name="across")
    across = run(tmp_path, corpus, *fast, name="across")
    assert column(across, "train/loss") == pytest.approx(column(one, "train/loss"), rel=5e-3)


@two_gpus
@pytest.mark.parametrize(
    "extra",
    [
        ["--activation_checkpoint.mode=full"],
        ["--activation_checkpoint.mode=memory_budget"],
        [*FLOAT8[:1], FLOAT8[1] + "tensorwise"],
        [*FLOAT8[:1], FLOAT8[1] + "tensorwise", "--float8.filter_fqns=['k_proj']"],
        [*FLOAT8[:1], FLOAT8[1] + "rowwise"],
    ],
    ids=["full", "memory_budget", "tensorwise", "filtered", "rowwise"],
)
def test_tensor_parallel_composes(tmp_path: Path, corpus: Path, extra: list[str]) -> None:
    fast = [*LARGE, "--compile.enable", *extra]
    one = run(tmp_path, corpus, *fast, name="one")
    two = run(tmp_path, corpus, *fast, TP, ngpu=2, name="two")
    # With one scale per tensor, a shard has another scale than the whole weight: on a CPU its
    # gradients differ from those of one process by about as much as those of float8 from those of fp32.
    num_steps = 2 if FLOAT8[1] + "tensorwise" in extra else 8
    for key, rel in (("train/loss", 5e-3), ("train/grad_norm", 5e-2)):
        assert column(two, key)[:num_steps] == pytest.approx(column(one, key)[:num_steps], rel=rel)


def operators_of_compiled_code(folder: Path) -> set[str]:
    """The operators of symmetric memory that the compiled code in a cache folder calls."""
    code = "".join(file.read_text() for file in folder.rglob("*.py"))
    return set(re.findall(r"symm_mem\.(\w+)", code))


@two_gpus
@pytest.mark.parametrize(
    ("extra", "product"),
    [
        ([], "matmul"),
        (["--activation_checkpoint.mode=full"], "matmul"),
        ([*FLOAT8[:1], FLOAT8[1] + "tensorwise"], "scaled_matmul"),
    ],
    ids=["bf16", "full", "tensorwise"],
)
def test_tensor_parallel_is_asynchronous(
    tmp_path: Path, corpus: Path, extra: list[str], product: str
) -> None:
    """Its collectives are fused with the matrix products beside them, and it trains like synchronous tensor
    parallel."""
    runs = {}
    for name, overlaps in (("waits", "false"), ("overlaps", "true")):
        keys = [*LARGE, "--compile.enable", *extra, TP, f"--compile.cache_dir={tmp_path / name}-code"]
        key = f"--parallelism.enable_async_tensor_parallel={overlaps}"
        runs[name] = run(tmp_path, corpus, *keys, key, ngpu=2, name=name)
    assert operators_of_compiled_code(tmp_path / "waits-code") == set()
    fused = operators_of_compiled_code(tmp_path / "overlaps-code")
    assert {f"fused_all_gather_{product}", "fused_matmul_reduce_scatter"} & fused, fused
    # In bf16, another order of sums grows to more than 0.5% of the loss within eight steps of this model.
    for key, rel in (("train/loss", 5e-3), ("train/grad_norm", 5e-2)):
        waits, overlaps = (column(runs[name], key)[:4] for name in ("waits", "overlaps"))
        assert overlaps == pytest.approx(waits, rel=rel)


@two_gpus
@pytest.mark.parametrize("layout", [[], [TP], [PP]], ids=["dp_shard", "tp", "pp"])
def test_offloaded_equals_one_gpu(tmp_path: Path, corpus: Path, layout: list[str]) -> None:
    offloaded = run(tmp_path, corpus, *FP32, *layout, "--training.enable_cpu_offload", ngpu=2)
    assert_same(offloaded, reference(corpus, *FP32), 1e-4)


def test_one_gpu_offloads_and_resumes(tmp_path: Path, corpus: Path) -> None:
    one = reference(corpus, *FP32)
    offload = [*FP32, "--training.enable_cpu_offload"]
    run(tmp_path, corpus, *offload, "--training.steps=4", name="off")
    off = run(tmp_path, corpus, *offload, name="off")
    assert_same(off, one, 1e-4)
    assert column(off, "memory/peak_allocated_gib")[-1] < column(one, "memory/peak_allocated_gib")[-1]


@two_gpus
def test_unmasked_sequences_go_chunk_by_chunk_through_cudnn(tmp_path: Path, corpus: Path) -> None:
    """In bf16, compiled, with selective activation checkpointing: the losses of flex and of one GPU."""
    fast = [*LARGE, "--compile.enable", "--activation_checkpoint.mode=selective"]
    fast += ["--model.overrides.head_dim=64", "--training.deterministic=false"]  # for cuDNN
    one = run(tmp_path, corpus, *fast, name="one")
    log = trained(tmp_path, corpus, *fast, CP, name="two", ngpu=2)
    assert "attention by head_tail" in log
    two = metrics_of(make_job(tmp_path, corpus, *fast, CP, name="two", world_size=2))
    flex = run(tmp_path, corpus, *fast, CP, "--attention.backend=flex", ngpu=2, name="flex")
    for actual in (two, flex):
        assert column(actual, "train/loss") == pytest.approx(column(one, "train/loss"), rel=5e-3)
        assert column(actual, "train/grad_norm") == pytest.approx(column(one, "train/grad_norm"), rel=5e-2)
