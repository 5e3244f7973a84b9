"""training.same_bits_on_any_ranks on CUDA: one GPU and two have the same digests of weights and state at each
saved step, compiled and in bf16; without the key they differ."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.gpu import column, on_two_gpus, run
from titanlite.checkpoint import commit
from titanlite.checkpoint.state_digest import combine, digests_of_checkpoint
from titanlite.data.batch import Batch
from titanlite.losses import CrossEntropy
from titanlite.mesh import ALONE, build_mesh
from titanlite.models.llama3 import Llama3
from titanlite.parallel.apply import parallelize
from titanlite.parallel.same_bits import Rows, squared_norms, write_squares
from titanlite.parallel.settings import ParallelSettings
from titanlite.parallelism import Parallelism

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
SHAPE = {"dim": 1024, "n_layers": 4, "hidden_dim": 4096, "vocab_size": 8192}
VARIANTS = {
    "eager": [],
    "compiled, untied head": ["--compile.enable", "--model.overrides.tie_word_embeddings=false"],
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


# ---- kernels


def test_gradients_are_added_one_after_the_other() -> None:
    from titanlite.parallel import same_bits_kernels as kernels

    torch.manual_seed(0)
    for n, num_rows in ((5, 1), (3000, 3), (1 << 20, 4)):
        for dtype in (torch.bfloat16, torch.float32):
            received = (torch.randn(num_rows, n, device="cuda") * 10).to(dtype)
            total = torch.randn(n, device="cuda")
            expected = total.clone()
            for gradient in received:
                expected.add_(gradient)
            kernels.add_in_order(total, received, is_first=False)
            assert torch.equal(total, expected)
            kernels.add_in_order(total, received, is_first=True)
            first = received[0].float()
            for gradient in received[1:]:
                first.add_(gradient)
            assert torch.equal(total, first)
    assert not torch.equal(total, received.float().sum(0)), "the order of torch's sum is another one"


@pytest.mark.parametrize("shape", [(300, 4096), (1000,), (77, 1001), (8, 60, 513)])
def test_squares_of_a_row_do_not_depend_on_other_rows_or_on_alignment(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    gradient = torch.randn(shape, device="cuda") * 10 ** torch.randn(shape, device="cuda")
    dims = min(max(len(shape) - 1, 1), 2)
    length, stride = shape[dims - 1], shape[1] if dims == 2 else 1
    num = torch.Size(shape[:dims]).numel()

    def of_rows(first: int, end: int) -> torch.Tensor:
        """The sums of the rows `first` to `end` along the last dim of cells, at their place in those of all
        rows. Their memory begins 4 bytes after a multiple of 16."""
        shard = gradient.narrow(dims - 1, first, end - first)
        memory = torch.empty(shard.numel() + 1, device="cuda")[1:].view(shard.shape)
        out = torch.zeros(num, dtype=torch.float64, device="cuda")
        inner = end - first if dims == 2 else 1
        rows = shard.shape[:dims].numel()
        place = Rows(rows, shard.numel() // rows, first, inner, stride)
        write_squares([memory.copy_(shard)], [place], out)
        return out

    whole = squared_norms([gradient, gradient], ALONE)
    exact = gradient.double().square().reshape(num, -1).sum(-1)
    torch.testing.assert_close(whole, exact.sum().expand(2), rtol=1e-13, atol=0)
    all_rows = torch.zeros_like(exact)
    write_squares([gradient], [Rows(num, gradient.numel() // num, 0, stride, stride)], all_rows)
    torch.testing.assert_close(all_rows, exact, rtol=1e-13, atol=0)
    assert torch.equal(of_rows(0, length // 3) + of_rows(length // 3, length), all_rows)


# ---- memory


def peak_bytes(rank: int, same_bits: bool) -> tuple[int, int]:
    """The peaks of allocated and of reserved memory, of two steps of three micro-batches on one of two
    ranks."""
    keys = {} if same_bits else {"fsdp_reduce": "micro_batch"}
    parallelism = Parallelism(fsdp_reshard_after_forward="always", **keys)
    mesh = build_mesh(parallelism, "cuda", rank, 2, same_bits=same_bits)
    settings = ParallelSettings(parallelism=parallelism, param_dtype=torch.bfloat16, same_bits=same_bits)
    model = parallelize(
        Llama3(flavor="debug", overrides=SHAPE).build_on_meta(), CrossEntropy(), mesh, settings
    )
    model.materialize(torch.device("cuda", rank), seed=0)
    tokens = torch.randint(0, 8192, (4, 129), device="cuda")
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), 512, 0)
    for _ in range(2):
        model.forward_backward([batch] * 3, torch.tensor(1000, device="cuda"))
        model.net.zero_grad()
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def test_the_key_needs_at_most_a_blocks_gradients_more_memory(tmp_path: Path) -> None:
    peaks = {}
    for same_bits in (False, True):
        (folder := tmp_path / str(same_bits)).mkdir()
        peaks[same_bits] = on_two_gpus(folder, peak_bytes, same_bits)
    block = 4 * (1024 * 4096 * 3 + 1024**2 * 4)  # at most, in fp32
    for ours, torchs in zip(peaks[True], peaks[False]):
        assert all(a <= b + block for a, b in zip(ours, torchs)), peaks
