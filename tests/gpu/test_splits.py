"""Sequences that are split into shorter ones, on CUDA: every kernel has the gradients of whole sequences with
a dense mask that hides the shorter ones from each other, each length is compiled once, and a change of the
length never waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import titanlite.job  # noqa: F401  (registers the components)
from tests.support.gpu import column, reference, run
from tests.support.splits import hidden_from_each_other, whole_batch
from titanlite.attention.base import AttentionBackend, AttentionKind, AttentionNeeds
from titanlite.attention.sdpa import SDPA
from titanlite.data.batch import Batch
from titanlite.losses import ChunkedCrossEntropy
from titanlite.mesh import ALONE
from titanlite.models.mistral import Mistral
from titanlite.parallel.apply import parallelize
from titanlite.parallel.compile import Compilations, Compile
from titanlite.parallel.settings import ParallelSettings
from titanlite.parallel.sharded_model import ShardedModel

pytestmark = pytest.mark.gpu
SEQ_LEN, LENGTHS = 256, (2, 1, 4)
SHAPE = {
    "dim": 128, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 32, "hidden_dim": 256,
    "vocab_size": 252,
}  # fmt: skip
BACKENDS = pytest.mark.parametrize("backend", ["varlen", "flex", "auto", "causal"])
COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


@pytest.fixture(autouse=True)
def all_kernels() -> Iterator[None]:
    """Allows all kernels after a test, of which a run without masks switches some off for its process."""
    yield
    for enable in ("flash", "cudnn", "mem_efficient", "math"):
        getattr(torch.backends.cuda, f"enable_{enable}_sdp")(True)


def model_with(
    attention: AttentionBackend,
    compiled: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    window: int = 0,
    device: str = "cuda",
) -> ShardedModel:
    with torch.device("meta"):
        net = Mistral(flavor="debug", overrides={**SHAPE, "sliding_window": window}).build()
    settings = ParallelSettings(attention=attention, compile=Compile(enable=compiled), param_dtype=dtype)
    model = parallelize(net, ChunkedCrossEntropy(), ALONE, settings)
    model.materialize(torch.device(device), seed=0)
    return model


def built(backend: str, window: int = 0, device: str = "cuda") -> AttentionBackend:
    """The backend of a run; `causal`: without document masks."""
    needs = AttentionNeeds(
        device=torch.device(device), dtype=torch.bfloat16, seq_len=SEQ_LEN, n_heads=SHAPE["n_heads"],
        n_kv_heads=SHAPE["n_kv_heads"], head_dim=SHAPE["head_dim"], masks_documents=backend != "causal",
        kinds=(AttentionKind(window),),
    )  # fmt: skip
    return AttentionBackend.choices["auto" if backend == "causal" else backend]().build(needs)


def gradients(model: ShardedModel, batch: Batch) -> list[torch.Tensor]:
    """The loss of one step, then its gradients."""
    device = next(model.net.parameters()).device
    model.net.zero_grad()
    loss = model.forward_backward([batch.to(device)], torch.tensor(batch.num_targets, device=device))
    return [loss, *(p.grad for p in model.net.parameters() if p.grad is not None)]


def largest_error(actual: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(actual, wanted, strict=True))


@COMPILED
@BACKENDS
@pytest.mark.parametrize("window", [0, 100])  # of the lengths, two exceed it
def test_every_kernel_has_the_gradients_of_masked_sequences(
    backend: str, compiled: bool, window: int
) -> None:
    torch._dynamo.reset()
    model = model_with(built(backend, window), compiled, window=window)
    dense = model_with(SDPA(), dtype=torch.float32, window=window)
    for step, num_splits in enumerate([*LENGTHS, *LENGTHS]):
        batch = whole_batch(step, masked=backend != "causal", seq_len=SEQ_LEN)
        actual = gradients(model, batch.split(num_splits))
        with sdpa_kernel(SDPBackend.MATH):
            wanted = gradients(dense, hidden_from_each_other(batch, num_splits))
            other = gradients(dense, hidden_from_each_other(batch, 8))
        assert largest_error(actual, wanted) < 0.05 < 0.1 < largest_error(other, wanted), num_splits
        whole = model.loss_sum(batch.to(torch.device("cuda")))  # as in validation
        with sdpa_kernel(SDPBackend.MATH):
            wanted_loss = dense.loss_sum(hidden_from_each_other(batch, 1).to(torch.device("cuda")))
        assert whole.item() == pytest.approx(wanted_loss.item(), rel=5e-3)


@COMPILED
@BACKENDS
def test_each_length_is_compiled_once_and_no_step_waits(backend: str, compiled: bool) -> None:
    """The second round has other documents, and far more."""
    torch._dynamo.reset()
    model, device = model_with(built(backend), compiled), torch.device("cuda")
    batches = [
        whole_batch(step, backend != "causal", SEQ_LEN, most).split(num_splits).to(device)
        for step, most in enumerate((4, 60))
        for num_splits in LENGTHS
    ]
    first, second = batches[: len(LENGTHS)], batches[len(LENGTHS) :]
    num_targets = torch.tensor(batches[0].num_targets, device=device)
    compilations, graphs = Compilations(), []
    for batch in first:
        model.forward_backward([batch], num_targets)
        graphs.append(compilations.since_last().get("compile/graphs", 0))
    assert max(graphs) == graphs[0], (
        "a later length needs more graphs than the first, which has the loss, too"
    )
    assert all(graphs) if compiled or backend == "flex" else not any(graphs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in [*second, *first]:
            model.forward_backward([batch], num_targets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert compilations.since_last() == {}


# Four steps of sequences of 64 tokens, then four of 256.
STAGES = [
    *("--training.seq_len=256", "--training.global_batch_size=4", "--data.holdout_sequences=0"),
    *("--model.overrides.head_dim=16", "--model.overrides.tie_word_embeddings=false"),
    "--stages=[{ until = '16 sequences', seq_len = 64 }, { until = 'end' }]",
]
MASKED = ["--data.packing=best_fit", "--data.mask_documents=true"]


@pytest.mark.parametrize("masked", [[], MASKED], ids=["causal", "masked"])
def test_a_compiled_run_resumes_to_the_bit_after_a_change_of_the_length(
    tmp_path: Path, corpus: Path, masked: list[str]
) -> None:
    """The resumed run compiles only the second length."""
    keys = [*STAGES, *masked, "--compile.enable"]
    whole = run(tmp_path, corpus, *keys, name="whole")
    run(tmp_path, corpus, *keys, "--training.steps=6", name="parts")
    parts = run(tmp_path, corpus, *keys, name="parts")
    for key in ("train/loss", "train/grad_norm", "data/batch_sha"):
        assert column(parts, key) == column(whole, key)
    longest = run(tmp_path, corpus, *keys, "--stages=[]", name="longest")
    assert column(longest, "data/batch_sha")[:4] == column(whole, "data/batch_sha")[:4]
    assert column(longest, "train/loss")[:4] != column(whole, "train/loss")[:4]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(
    ("axis", "masked"),
    [
        ("data_parallel_shard", MASKED),
        ("tensor", []),
        ("context", []),
        ("context", MASKED),
        ("pipeline", MASKED),
    ],
    ids=["data-masked", "tensor-causal", "context-causal", "context-masked", "pipeline-masked"],
)
def test_stages_on_two_gpus_equal_one(tmp_path: Path, corpus: Path, axis: str, masked: list[str]) -> None:
    name = axis if axis.startswith("data") else f"{axis}_parallel"
    layout = f"--parallelism.{name}_degree=2"
    fp32 = [*STAGES, *masked, "--training.mixed_precision_param=float32"]
    one, two = reference(corpus, *fp32), run(tmp_path, corpus, *fp32, layout, ngpu=2)
    assert column(two, "data/batch_sha") == column(one, "data/batch_sha")
    for key in ("train/loss", "train/grad_norm"):
        assert column(two, key) == pytest.approx(column(one, key), rel=1e-4)
