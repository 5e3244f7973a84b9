"""A run with training.same_bits_on_any_ranks has the same bits of weights and optimizer state on any number
of data-parallel ranks, also across resumes on other numbers. The controls differ."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.checkpoints import archived
from tests.support.golden import EXPERTS, LATENT
from tests.support.jobs import make_job, metrics_in
from tests.support.non_finite import WATCHED, bad_steps
from tests.support.runs import PP, TP, UNTIED, train_on_rank
from tests.support.spikes import garbage_sequences
from tests.support.staged import STAGED, STEPS, staged
from tests.support.tiers import full
from titanlite import cli
from titanlite.checkpoint import commit
from titanlite.checkpoint.reader import read_metadata, read_tensor
from titanlite.checkpoint.state_digest import combine, digests_of_checkpoint
from titanlite.config.component import ConfigError
from titanlite.mesh import local_shard
from titanlite.metrics import spikes
from titanlite.parallel import clip
from titanlite.parallel.same_bits import OrderedReduceScatter
from titanlite.runtime import process
from titanlite.train import train

ON = "--training.same_bits_on_any_ranks"
KEYS = ["--training.local_batch_size=2", "--training.global_batch_size=24", "--training.max_norm=0.5"]
BF16 = "--training.mixed_precision_param=bfloat16"
HSDP = "--parallelism.data_parallel_replicate_degree=2"
GUARD = ["--guard.skip_sigma=6.0", "--guard.window=2"]
FULL_CHECKPOINT = "--activation_checkpoint.mode=full"
MOE = ["--model.name=qwen3_moe", *EXPERTS]
NORMUON = ["--optimizer.name=muon", "--optimizer.normalize=neuron", "--optimizer.split_heads"]
FOUR_EXPERTS = "--model.overrides.n_experts=4"  # two on each of the first two ranks; none on the third
CHUNKED = ["--loss.name=chunked_cross_entropy", "--loss.chunk_tokens=24", "--loss.z_loss_multiplier=1e-4"]
BIASED = ["--model.name=deepseek_v3", *EXPERTS, *LATENT, "--moe.load_balance=bias", "--moe.z_loss_coeff=0.1"]

Run = Callable[..., dict[str, str]]


@pytest.fixture
def run(tmp_path: Path, corpus: Path, run_on: Callable[..., Any]) -> Run:
    """`run(ranks, *keys)`: SHA-256 of the state of a run after 4 steps. `name`: of a run to resume.
    `on_rank`: the function that trains."""
    names = iter(f"run-{i}" for i in range(10))

    def run(ranks: int, *keys: str, steps: int = 4, name: str = "", on_rank: Any = train_on_rank) -> Any:
        name = name or next(names)
        keys = (*KEYS, "--lr_scheduler.total_steps=8", *keys, f"--training.steps={steps}")
        run_on(ranks, on_rank, tmp_path, corpus, list(keys), name, ranks)
        return state_of(tmp_path / name / f"checkpoint/step-{steps}")

    return run


def state_of(checkpoint: Path) -> dict[str, str]:
    """SHA-256 of every tensor of a checkpoint, whole, and the digests that were made while it was saved."""
    metadata = read_metadata(checkpoint)
    tensors = {name: read_tensor(checkpoint, name, metadata) for name in metadata.state_dict_metadata}
    data = {name: tensor.view(-1).view(torch.uint8).numpy() for name, tensor in tensors.items()}
    digests = commit.read_manifest(checkpoint).get("digest", {})
    return {name: hashlib.sha256(bytes_).hexdigest() for name, bytes_ in data.items()} | digests


@pytest.mark.parametrize(
    ("ranks", "keys"),
    [
        full(3, []),
        full(2, []),
        full(4, []),
        full(2, [BF16]),
        full(3, [BF16]),
        full(4, [HSDP]),
        full(4, [HSDP, BF16]),
        full(3, ["--optimizer.name=muon"]),
        full(3, ["--optimizer.state_dtype=int8"]),
        full(3, MOE),
        full(4, [*MOE, "--moe.load_balance=global", BF16]),
        full(3, ["--model.name=qwen3", FULL_CHECKPOINT, "--ema.enable", *GUARD]),
        full(3, ["--training.clip=tensor", "--data.packing=best_fit", "--data.mask_documents"]),
        full(2, ["--compile.enable", BF16]),
        full(2, ["--compile.enable", FULL_CHECKPOINT, *MOE]),
        full(6, [HSDP]),  # three shards of a hidden size of 32, each in two parts
        full(3, [*MOE, FOUR_EXPERTS, "--moe.load_balance=sequence"]),
        full(3, [*BIASED, "--moe.sequence_loss_coeff=0.01"]),
        full(3, [*NORMUON, "--optimizer.state_dtype=bfloat16"]),
        full(3, [*CHUNKED, "--data.num_workers=1", "--validation.enable", "--metrics.detail_freq=2"]),
    ],
)
def test_any_number_of_ranks_has_the_bits_of_one(run: Run, ranks: int, keys: list[str]) -> None:
    alone = [key for key in keys if key != HSDP]
    assert run(ranks, ON, *keys) == run(1, ON, *alone)


@pytest.mark.parametrize("hops", [full((3, 1)), full((1, 4, 2)), (2, 3)])
def test_resumes_on_other_numbers_keep_the_bits(run: Run, hops: tuple[int, ...]) -> None:
    whole = run(1, ON, steps=2 * len(hops))
    for i, ranks in enumerate(hops):
        state = run(ranks, ON, steps=2 * (i + 1), name="hops")
    assert state == whole


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A small model as a Hugging Face directory."""
    folder = tmp_path_factory.mktemp("base")
    job = make_job(folder, corpus, "--training.steps=1")
    assert train(job) == 0
    assert cli.run(["export", str(job.folder), str(folder / "hf")]) == 0
    return folder / "hf"


@pytest.mark.full
@pytest.mark.parametrize("keys", [[], [BF16, "--optimizer.name=muon", "--training.clip=tensor"]], ids=str)
def test_adapters_of_a_frozen_model(run: Run, base: Path, keys: list[str]) -> None:
    keys = [ON, *keys, "--lora.enable", "--lora.rank=3", f"--checkpoint.initial_load_path={base}"]
    whole = run(1, *keys)
    run(2, *keys, steps=2, name="hops")
    assert run(3, *keys, name="hops") == whole
    assert any(name.endswith("lora_B.weight") for name in whole)
    assert "model.model.norm.weight" not in whole


@pytest.mark.full
def test_stages_and_a_batch_ramp(tmp_path: Path, run: Run) -> None:
    """Steps of 4, 8 and 16 sequences, sequences of 16 and 32 tokens, three mixtures, and schedules."""
    keys = [ON, *STAGED, "--lr_scheduler.total_steps=16"]
    whole = run(1, *keys, steps=STEPS, name="whole")
    for ranks, steps in ((2, 5), (4, 8), (2, STEPS)):
        state = run(ranks, *keys, steps=steps, name="hops")
    assert state == whole
    tokens = [line["progress/total_tokens"] for line in metrics_in(tmp_path / "whole")]
    assert len({after - before for before, after in itertools.pairwise(tokens)}) > 2


def with_an_empty_cache(folder: Path, *args: Any) -> None:
    """Train on one rank, whose kernels are compiled anew."""
    cache = folder / f"cache-{os.getpid()}"
    with patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(cache)):
        train_on_rank(folder, *args)
    assert list(cache.rglob("*.so")), "no kernel was compiled"


@pytest.mark.full
def test_compiled_anew_by_each_rank(run: Run) -> None:
    keys = [ON, "--compile.enable", BF16, *CHUNKED]
    assert run(2, *keys, on_rank=with_an_empty_cache) == run(1, *keys, on_rank=with_an_empty_cache)


@pytest.mark.full
def test_a_resumed_run_with_several_graphs_of_the_loss(run: Run) -> None:
    """Chunks of 62 tokens have two sizes. The graph of the second may serve the first in later steps."""
    keys = [ON, "--compile.enable", *CHUNKED, "--training.seq_len=31"]
    whole = run(1, *keys)
    run(2, *keys, steps=2, name="hops")
    assert run(3, *keys, name="hops") == whole


def with_strict_averages(*args: Any) -> None:
    """Train on one rank of a run that limits each gradient from step 2 on."""
    with patch.object(clip, "GLOBAL_STEPS", 1):
        train_on_rank(*args)


@pytest.mark.full
def test_clipping_by_averages_of_norms(tmp_path: Path, run: Run) -> None:
    keys = [ON, "--training.clip=tensor", BF16, "--metrics.detail_freq=1"]
    whole = run(1, *keys, on_rank=with_strict_averages, name="whole")
    assert run(3, *keys, on_rank=with_strict_averages) == whole
    assert run(3, *keys) != whole, "control: clips by the total norm"
    assert any(line.get("train/clipped_tensors") for line in metrics_in(tmp_path / "whole")[1:])


def with_outliers(*args: Any) -> None:
    """Train on one rank, with random tokens in three steps."""
    with bad_steps({14, 15, 17}, "random tokens"):
        train_on_rank(*args)


def with_nan(*args: Any) -> None:
    """Train on one rank, with NaN in the gradients of the last rank in three steps."""
    with bad_steps({3, 4, 6}):
        train_on_rank(*args)


@pytest.mark.full
@pytest.mark.parametrize("on_rank", [with_outliers, with_nan])
def test_skipped_steps(tmp_path: Path, run: Run, on_rank: Any) -> None:
    keys = [ON, *WATCHED]
    whole = run(1, *keys, steps=20, on_rank=on_rank, name="whole")
    run(2, *keys, steps=16, on_rank=on_rank, name="hops")
    assert run(3, *keys, steps=20, on_rank=on_rank, name="hops") == whole
    assert metrics_in(tmp_path / "hops")[-1]["train/skipped_steps"] == 3


def with_a_spike(*args: Any) -> None:
    """Train on one rank of a run that rewinds after the sequences of 24 steps, which are random tokens."""
    with garbage_sequences(800, 991), patch.object(spikes, "BEFORE", 64):
        train_on_rank(*args)


@pytest.mark.full
def test_a_rewind(tmp_path: Path, run: Run) -> None:
    keys = [ON, "--training.seq_len=16", "--training.global_batch_size=8", "--model.overrides.n_layers=1"]
    keys += ["--optimizer.lr=1e-3", "--lr_scheduler.total_steps=2000", "--checkpoint.interval=20"]
    keys += ["--guard.on_spike=rewind", "--guard.rewind_margin=15"]
    states = [run(n, *keys, steps=150, on_rank=with_a_spike, name=f"of-{n}") for n in (1, 4)]
    assert states[0] == states[1]
    assert archived(tmp_path / "of-1") == archived(tmp_path / "of-4") == [[100, 120]]


def test_losses_norms_and_digests_have_equal_bits_too(tmp_path: Path, run: Run) -> None:
    for ranks in (1, 2):
        run(ranks, ON, "--metrics.digest_freq=1", name=f"of-{ranks}")
    keys = ("train/loss", "train/grad_norm", "data/batch_sha", "train/weights_digest")
    of_1, of_2 = ([[row[k] for k in keys] for row in metrics_in(tmp_path / f"of-{n}")] for n in (1, 2))
    assert of_1 == of_2


def test_the_manifest_has_the_digests_and_the_conditions(tmp_path: Path, run: Run) -> None:
    run(2, ON, name="a")
    path = tmp_path / "a/checkpoint/step-4"
    manifest = commit.read_manifest(path)
    assert manifest["digest"] == combine(digests_of_checkpoint(path))
    assert manifest["bits"]["local_batch_size"] == 2
    assert "ended" not in manifest["bits"]
    run(2, ON, "--training.local_batch_size=4", name="a", steps=6)
    ended = commit.read_manifest(tmp_path / "a/checkpoint/step-6")["bits"]["ended"]
    assert ended == ["step 4: local_batch_size 2 -> 4"]


# ---- controls


def with_torchs_sums(*args: Any) -> None:
    """Train on one rank, with the reduce-scatter of torch."""

    def reduce(self: Any, output: Any, input_: Any, group: Any, op: Any, async_op: bool = False) -> None:
        part = torch.empty(output.shape, dtype=torch.float32)
        dist.reduce_scatter_tensor(part, input_.float(), group=group)
        if self._sum is None:
            self._sum = output.zero_()
        self._sum.add_(part)

    with patch.object(OrderedReduceScatter, "__call__", call_by_name(reduce)):
        train_on_rank(*args)


def call_by_name(reduce: Any) -> Any:
    return lambda self, output_tensor, input_tensor, group, op, async_op=False: reduce(
        self, output_tensor, input_tensor, group, op
    )


def with_swapped_ranks(*args: Any) -> None:
    """Train on one rank, which adds the gradients of the last rank first."""
    exchange = dist.all_to_all_single

    def swapped(received: torch.Tensor, sent: torch.Tensor, group: Any = None) -> None:
        exchange(received, sent, group=group)
        received.copy_(received.view(group.size(), -1).flip(0).view(received.shape))

    with patch.object(dist, "all_to_all_single", swapped):
        train_on_rank(*args)


def with_norms_by_shard(*args: Any) -> None:
    """Train on one rank, with the squares of all gradients summed by shard, one after the other in fp32:
    numpy rounds each sum, torch's cumsum on a CPU only what it returns."""

    def squared(gradients: Any, mesh: Any) -> torch.Tensor:
        total = torch.zeros(len(gradients))
        squares = torch.cat([local_shard(g).flatten() for g in gradients]).square()
        total[0] = float(np.cumsum(squares.numpy(), dtype=np.float32)[-1])
        if mesh.dp_size > 1:
            dist.all_reduce(total)
        return total.double()

    with patch.object(clip, "squared_norms", squared):
        train_on_rank(*args)


@pytest.mark.parametrize(
    "control",
    [full(with_torchs_sums), full(with_swapped_ranks), full(with_norms_by_shard), full(train_on_rank)],
)
def test_control_other_sums_have_other_bits(run: Run, control: Callable[..., None]) -> None:
    key = "--training.deterministic" if control is train_on_rank else ON
    assert run(3, key, on_rank=control) != run(1, key, on_rank=control)


# ---- refused

ZERO_BUBBLE = ["--parallelism.pipeline_parallel_schedule=ZBVZeroBubble", "--model.overrides.n_layers=6"]
EIGHT_LATER = staged('until = "48 sequences"', 'until = "end", global_batch_size = 8')
RAMP_OF_EIGHT = '--training.batch_ramp=[{ until = "48 sequences", global_batch_size = 8 }]'


@pytest.mark.parametrize(
    ("world_size", "keys", "message"),
    [
        (2, [TP], "not with parallelism.tensor_parallel_degree = 2"),
        (2, [PP, UNTIED], "not with parallelism.pipeline_parallel_degree = 2"),
        (2, [HSDP], "not with 2 unsharded copies"),
        (1, ["--training.enable_cpu_offload"], "not with training.enable_cpu_offload"),
        (1, ["--training.mixed_precision_reduce=bfloat16"], "not with training.mixed_precision_reduce"),
        (1, ["--float8.enable", "--compile.enable"], "not with float8.enable"),
        (1, ["--compile.enable", "--compile.cuda_graphs"], "not with compile.cuda_graphs"),
        (2, [PP, UNTIED, *ZERO_BUBBLE], "not with parallelism.pipeline_parallel_degree = 2"),
        (2, ["--parallelism.context_parallel_degree=2"], "not with parallelism.context_parallel_degree = 2"),
        (
            2,
            [*MOE, "--parallelism.expert_parallel_degree=2"],
            "not with parallelism.expert_parallel_degree",
        ),
        (5, [], "5 ranks cannot share the 12 micro-batches of a step; .* allows 1, 2, 3, 4, 6, 12 data-"),
        (3, [EIGHT_LATER], "3 ranks cannot share the 4 micro-batches of a step; .* allows 1, 2, 4 data-"),
        (3, [RAMP_OF_EIGHT], "3 ranks cannot share the 4 micro-batches of a step; .* allows 1, 2, 4 data-"),
        (
            2,
            [EIGHT_LATER.replace("8", "9")],
            "9 sequences are not a multiple of local_batch_size 2 x 2",
        ),
    ],
)
def test_what_cannot_keep_the_promise_is_refused(
    tmp_path: Path, corpus: Path, world_size: int, keys: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        make_job(tmp_path, corpus, *KEYS, ON, *keys, world_size=world_size)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["stages.1", "training.batch_ramp.0"])
def test_a_refusal_names_the_key_of_the_batch_size(tmp_path: Path, corpus: Path, key: str) -> None:
    keys = EIGHT_LATER if key == "stages.1" else RAMP_OF_EIGHT
    with pytest.raises(ConfigError, match="3 ranks cannot share the 4 micro-batches") as error:
        make_job(tmp_path, corpus, *KEYS, ON, keys, world_size=3)
    assert f"{key}.global_batch_size: " in str(error.value)


def test_a_device_without_float64_is_refused(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "pick_device", lambda: torch.device("mps"))
    with pytest.raises(ConfigError, match=r"float64, which Apple's GPUs \(mps\) lack") as error:
        train(make_job(tmp_path, corpus, *KEYS, ON))
    assert error.value.key == "training.same_bits_on_any_ranks"
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_without_the_key_one_process_is_not_sharded(tmp_path: Path, corpus: Path) -> None:
    job = make_job(tmp_path, corpus, *KEYS, "--training.steps=1")
    assert train(job) == 0
    assert not dist.is_initialized()
