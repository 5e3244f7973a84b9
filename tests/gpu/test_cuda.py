"""What only a GPU shows: bf16 in one process, FSDP2 over NCCL, compile, pinned asynchronous checkpoints.

Run with `pytest -m gpu tests/gpu`; the tests over NCCL need two devices.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import titanlite.attention.auto  # noqa: F401  (registers the backends)
from tests.support.gpu import column, reference, run, trained
from tests.support.jobs import make_job, metrics_of
from tests.support.runs import FOUR_MICRO_BATCHES
from titanlite.attention.base import AttentionBackend, AttentionKind, AttentionNeeds
from titanlite.models.mistral import Mistral
from titanlite.parallel.compile import Compile, apply_compile
from titanlite.parallel.initialize import fill_normal
from titanlite.torch_compat import compilations

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]


def test_initial_weights_do_not_depend_on_the_device() -> None:
    cpu, gpu = torch.empty(300, 70), torch.empty(300, 70, device="cuda")
    fill_normal(cpu, "w", 0.0, 0.02, seed=1)
    fill_normal(gpu, "w", 0.0, 0.02, seed=1)
    assert torch.allclose(cpu, gpu.cpu(), atol=1e-7)


def test_bf16_resumes_bit_identically(tmp_path: Path, corpus: Path) -> None:
    whole = run(tmp_path, corpus, name="whole")
    run(tmp_path, corpus, "--training.steps=3", name="parts")
    parts = run(tmp_path, corpus, name="parts")
    for key in ("train/loss", "train/grad_norm", "data/batch_sha"):
        assert column(parts, key) == column(whole, key)


def test_compile_and_recompute_give_the_same_loss(tmp_path: Path, corpus: Path) -> None:
    plain = run(tmp_path, corpus, name="plain")
    both = run(tmp_path, corpus, "--compile.enable", "--activation_checkpoint.mode=full", name="both")
    assert column(both, "train/loss") == pytest.approx(column(plain, "train/loss"), rel=5e-3)  # bf16 rounding


@pytest.mark.parametrize("backend", ["sdpa", "flex"])
def test_deterministic_compiled_runs_are_equal_without_a_shared_cache(
    tmp_path: Path, corpus: Path, backend: str
) -> None:
    """The kernels that inductor chose, by timing, are otherwise kept in its cache."""
    keys = ["--compile.enable", "--training.deterministic", f"--attention.backend={backend}"]
    keys += ["--training.seq_len=256", "--data.holdout_sequences=0", "--model.overrides.head_dim=16"]
    metrics = []
    for name in ("one", "two"):
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / f"cache_{name}")}
        trained(tmp_path, corpus, *keys, name=name, **cache)
        metrics.append(metrics_of(make_job(tmp_path, corpus, FOUR_MICRO_BATCHES, *keys, name=name)))
    for key in ("train/loss", "train/grad_norm"):
        assert column(metrics[0], key) == column(metrics[1], key)


MASKED = [
    *("--data.packing=best_fit", "--data.mask_documents=true", "--training.seq_len=256"),
    *("--data.holdout_sequences=0", "--model.overrides.head_dim=16", "--training.global_batch_size=2"),
]


@pytest.mark.parametrize("seq_len", [32, 200, 512])
@pytest.mark.parametrize(
    ("backend", "dtype"), [("flex", torch.float32), ("flex", torch.bfloat16), ("varlen", torch.bfloat16)]
)
def test_kernels_keep_documents_apart(backend: str, dtype: torch.dtype, seq_len: int) -> None:
    """Outputs and gradients, with fewer key heads than query heads, against a dense mask in fp32."""
    generator = torch.Generator().manual_seed(0)
    positions = torch.arange(seq_len).repeat(3, 1)
    for i, starts in enumerate(([1, 2, 30], [], [seq_len // 2])):
        for start in starts:
            positions[i, start:] = torch.arange(seq_len - start)
    num_documents = int((positions == 0).sum())
    heads = [torch.randn(3, seq_len, h, 32, generator=generator).to(dtype) for h in (4, 2, 2)]
    weight = torch.randn(3, seq_len, 4, 32, generator=generator)

    def results(backend: str, dtype: torch.dtype) -> list[torch.Tensor]:
        q, k, v = (h.to("cuda", dtype).requires_grad_() for h in heads)
        attention = AttentionBackend.choices[backend]().for_documents(positions.cuda(), num_documents)
        out = attention.attend(q, k, v)
        (out.float() * weight.cuda()).sum().backward()
        return [x.detach().float() for x in (out, q.grad, k.grad, v.grad)]

    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = results("sdpa", torch.float32)
    for ours, theirs in zip(results(backend, dtype), expected):
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


@pytest.mark.parametrize("window", [1, 20, 64])
@pytest.mark.parametrize("documents", [False, True], ids=["sequences", "documents"])
@pytest.mark.parametrize(
    ("backend", "dtype"), [("flex", torch.float32), ("flex", torch.bfloat16), ("varlen", torch.bfloat16)]
)
def test_kernels_keep_to_the_window(backend: str, dtype: torch.dtype, documents: bool, window: int) -> None:
    """Outputs and gradients against a dense mask in fp32. Without the window they differ."""
    T, generator = 200, torch.Generator().manual_seed(0)
    positions = torch.arange(T).repeat(3, 1)
    positions[1, 90:] = torch.arange(T - 90)
    heads = [torch.randn(3, T, h, 32, generator=generator).to(dtype) for h in (4, 2, 2)]
    weight = torch.randn(3, T, 4, 32, generator=generator)

    def results(backend: str, dtype: torch.dtype, window: int) -> list[torch.Tensor]:
        q, k, v = (h.to("cuda", dtype).requires_grad_() for h in heads)
        chosen, tokens = AttentionBackend.choices[backend](), positions.cuda()
        attention = chosen.for_documents(tokens, 4) if documents else chosen.for_sequences(tokens)
        out = attention.of_kind(AttentionKind(window), tokens).attend(q, k, v)
        (out.float() * weight.cuda()).sum().backward()
        return [x.detach().float() for x in (out, q.grad, k.grad, v.grad)]

    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = results("sdpa", torch.float32, window)
        longer = results("sdpa", torch.float32, window + 1)
    for ours, theirs in zip(results(backend, dtype, window), expected):
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max() + 1e-4
    assert (longer[0] - expected[0]).abs().max() > 0.1


WINDOW = ["--model.name=mistral", "--model.overrides.sliding_window=40", "--model.overrides.head_dim=16"]


@pytest.mark.parametrize("compiled", [[], ["--compile.enable"]], ids=["eager", "compiled"])
@pytest.mark.parametrize("backend", ["flex", "varlen"])
def test_a_window_trains_alike_with_every_kernel(
    tmp_path: Path, corpus: Path, backend: str, compiled: list[str]
) -> None:
    keys = [*WINDOW, "--training.seq_len=256", "--data.holdout_sequences=0"]
    keys += ["--training.global_batch_size=2"]
    dense = ["--attention.backend=sdpa", "--attention.sdpa_kernel=math"]
    wanted = column(reference(corpus, *keys, *dense), "train/loss")
    ours = run(tmp_path, corpus, *keys, *compiled, f"--attention.backend={backend}", name="ours")
    assert column(ours, "train/loss") == pytest.approx(wanted, rel=5e-3)
    auto = run(tmp_path, corpus, *keys, *compiled, name="auto")
    if backend == "varlen":  # the choice of auto
        assert column(auto, "train/loss") == column(ours, "train/loss")


def forwards(backend: str, documents: bool, compiled: bool) -> tuple[list[torch.Tensor], list[str]]:
    """The logits of a model with a window on batches of 2, 3 and 2 sequences, and the names of the functions
    that were compiled."""
    torch.compiler.reset()
    device, T = torch.device("cuda"), 256
    family = Mistral(flavor="debug", overrides={"sliding_window": 40, "n_layers": 2})
    net, c = family.build().to(device, torch.bfloat16), family.config
    for name, parameter in net.named_parameters():
        fill_normal(parameter, name, net.init_normal(name)[0], 0.1, seed=0)
    apply_compile(net, Compile(enable=compiled))
    needs = AttentionNeeds(
        device=device, dtype=torch.bfloat16, seq_len=T, n_heads=c.n_heads, n_kv_heads=c.n_kv_heads,
        head_dim=c.head_dim, masks_documents=documents, kinds=tuple(c.attention_kinds),
    )  # fmt: skip
    chosen = AttentionBackend.choices[backend]()
    if backend != "sdpa":  # its build would switch off kernels in the whole process
        chosen = chosen.build(needs)
    before, logits = compilations(), []
    generator = torch.Generator().manual_seed(1)
    for size in (2, 3, 2):
        tokens = torch.randint(0, c.vocab_size, (size, T), generator=generator).to(device)
        positions = torch.arange(T, device=device).repeat(size, 1)
        positions[:, 90:] = torch.arange(T - 90, device=device)
        if documents:
            attention = chosen.for_documents(positions, 2 * size)
        else:
            attention, positions = chosen.for_sequences(tokens), torch.arange(T, device=device)
        with torch.no_grad():
            logits.append(net(tokens, positions, attention).float())
    new = [item for item in compilations() if not any(item.record is old.record for old in before)]
    return logits, [item.function for item in new if item.function]


@pytest.mark.parametrize("documents", [False, True], ids=["sequences", "documents"])
@pytest.mark.parametrize("backend", ["flex", "varlen"])
def test_a_window_compiles_one_graph_per_batch_size(backend: str, documents: bool) -> None:
    """One graph of the blocks, whose input has another shape, and with flex one of the block mask in
    documents. Block masks of whole sequences do not depend on the batch size."""
    logits, functions = forwards(backend, documents, compiled=True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        wanted, _ = forwards("sdpa", documents, compiled=False)
    for ours, theirs in zip(logits, wanted):
        assert (ours - theirs).norm() < 0.02 * theirs.norm()
    assert functions.count("forward") == 2
    num_masks = 0 if backend != "flex" else 2 if documents else 1
    assert functions.count("create_block_mask") == num_masks


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_window_on_two_gpus_trains_as_on_one(tmp_path: Path, corpus: Path) -> None:
    keys = [*WINDOW, "--training.seq_len=256", "--data.holdout_sequences=0", "--optimizer.lr=1e-5"]
    keys += ["--training.global_batch_size=2", "--model.overrides.tie_word_embeddings=false"]
    one = column(run(tmp_path, corpus, *keys, name="one"), "train/loss")
    for layout in ("context", "tensor"):
        degree = f"--parallelism.{layout}_parallel_degree=2"
        two = run(tmp_path, corpus, *keys, degree, ngpu=2, name=layout)
        assert column(two, "train/loss") == pytest.approx(one, rel=5e-3)


@pytest.mark.parametrize("backend", ["flex", "varlen"])
def test_masked_rows_train_alike_and_resume(tmp_path: Path, corpus: Path, backend: str) -> None:
    overrides = [*MASKED, f"--attention.backend={backend}"]
    dense = reference(corpus, *MASKED, "--attention.backend=sdpa", "--attention.sdpa_kernel=math")
    whole = run(tmp_path, corpus, *overrides, name="whole")
    assert column(whole, "data/batch_sha") == column(dense, "data/batch_sha")
    assert column(whole, "train/loss") == pytest.approx(column(dense, "train/loss"), rel=5e-3)
    compiled = run(tmp_path, corpus, *overrides, "--compile.enable", name="compiled")
    assert column(compiled, "train/loss") == pytest.approx(column(dense, "train/loss"), rel=5e-3)
    run(tmp_path, corpus, *overrides, "--training.steps=3", name="parts")
    parts = run(tmp_path, corpus, *overrides, name="parts")
    for key in ("train/loss", "train/grad_norm"):
        assert column(parts, key) == column(whole, key)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_how_weights_are_gathered_changes_no_number(tmp_path: Path, corpus: Path) -> None:
    default = run(tmp_path, corpus, ngpu=2, name="default")
    freed = run(tmp_path, corpus, "--parallelism.fsdp_reshard_after_forward=always", ngpu=2, name="freed")
    assert column(freed, "train/loss") == column(default, "train/loss")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_equal_one_and_resume_across(tmp_path: Path, corpus: Path) -> None:
    fp32 = ["--training.mixed_precision_param=float32"]
    # In bf16, the default would keep the gathered weights of so small a model.
    fp32 += ["--parallelism.fsdp_reshard_after_forward=always", "--model.overrides.tie_word_embeddings=false"]
    one = run(tmp_path, corpus, *fp32, name="one")
    two = run(tmp_path, corpus, *fp32, ngpu=2, name="two")
    run(tmp_path, corpus, *fp32, "--training.steps=4", ngpu=2, name="across")
    across = run(tmp_path, corpus, *fp32, name="across")
    masked = [*fp32, *MASKED]
    one_masked = run(tmp_path, corpus, *masked, name="one_masked")
    two_masked = run(tmp_path, corpus, *masked, "--training.local_batch_size=1", ngpu=2, name="two_masked")
    assert column(two_masked, "train/loss") == pytest.approx(column(one_masked, "train/loss"), abs=1e-5)
    hsdp = ["--parallelism.data_parallel_replicate_degree=2", "--parallelism.fsdp_reduce=micro_batch"]
    copies = run(tmp_path, corpus, *fp32, *hsdp, ngpu=2, name="hsdp")
    for other in (two, across, copies):
        assert column(other, "data/batch_sha") == column(one, "data/batch_sha")
        assert column(other, "train/loss") == pytest.approx(column(one, "train/loss"), abs=1e-5)
