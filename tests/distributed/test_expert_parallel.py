"""Expert parallel trains as one process does on every layout: losses, gradient norms and, name by name, the
weights, behind which two real faults would hide from the loss. Checkpoints resume on any degree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.support import ranks
from tests.support.jobs import make_job, metrics_of
from tests.support.layout_runs import NUMERIC, Runs, job_of, train_on_rank
from tests.support.layouts import AXES, MASKED, OPTIONS, Part
from tests.support.models import VARIANTS, family, hugging_face, keys_of, tensors_in
from tests.support.runs import assert_same
from tests.support.tiers import sampled
from titanlite import cli
from titanlite.models.moe import Router
from titanlite.parallel import expert_parallel, tensor_parallel
from titanlite.train import train

STEPS = 3
MODEL = [
    "--model.name=qwen3_moe", "--model.overrides.n_experts=8", "--model.overrides.n_experts_per_token=2",
    "--model.overrides.moe_hidden_dim=16", *MASKED,
]  # fmt: skip


def layout(degree: int, *names: str, keys: tuple[str, ...] = (), ranks: int = 1) -> Part:
    """A layout of two ranks along each of the axes in `names`, with options, and expert parallel."""
    parts = [{**AXES, **OPTIONS}[name] for name in names]
    for part in parts:
        ranks *= part.ranks
    options = [key for part in parts for key in part.keys]
    degree_key = f"--parallelism.expert_parallel_degree={degree}"
    return Part(ranks, [*MODEL, "--training.local_batch_size=1", *options, *keys, degree_key])


ALL_TO_ALL = ("--parallelism.expert_parallel_comm_backend=all_to_all",)
GATHER = ("--parallelism.expert_parallel_comm_backend=gather",)
FLOAT8 = (
    *(f"--float8.{key}" for key in ("enable", "experts", "emulate", "recipe=rowwise")),
    "--model.overrides.head_dim=16",
)
TWO_EXPERTS = ("--model.overrides.n_experts=2",)
DEEPSEEK = (
    "--model.name=deepseek_v3",
    *(
        f"--model.overrides.{name}"
        for name in (
            "n_kv_heads=4",
            "head_dim=12",
            "rope_head_dim=4",
            "v_head_dim=8",
            "q_lora_rank=12",
            "kv_lora_rank=16",
            "moe_hidden_dim=24",
        )
    ),
)
BIAS = ("--moe.load_balance=bias", "--moe.load_balance_coeff=0.01")
LAYOUTS = {
    "dp_shard 2, degree 2": layout(2, "dp_shard"),
    "tp 2, degree 1": layout(1, "tp"),
    "tp 2, degree 2": layout(2, "tp"),
    "cp 2, degree 2": layout(2, "cp"),
    "dp_shard 2, degree 2, full activation checkpointing": layout(
        2, "dp_shard", "full activation checkpointing"
    ),
    "dp_shard 2, degree 2, mlp activation checkpointing": layout(
        2,
        "dp_shard",
        "op activation checkpointing",
        keys=("--activation_checkpoint.selective_ac_option=mlp",),
    ),
    "dp_shard 2, degree 2, fsdp_reduce micro_batch": layout(2, "dp_shard", "fsdp_reduce micro_batch"),
    "dp_shard 2, degree 2, float8 in experts": layout(2, "dp_shard", keys=FLOAT8),
    "dp_shard 4, degree 2": layout(2, ranks=4),
    "dp_shard 4, degree 4": layout(4, ranks=4),
    "dp_shard 4, degree 2, reshard always": layout(2, "fsdp_reshard_after_forward always", ranks=4),
    "dp_replicate 2 x dp_shard 2, degree 2": layout(2, "dp_replicate", "dp_shard"),
    "tp 2 x dp_shard 2, degree 1": layout(1, "tp", "dp_shard"),
    "tp 2 x dp_shard 2, degree 2": layout(2, "tp", "dp_shard"),
    "tp 2 x dp_shard 2, degree 4": layout(4, "tp", "dp_shard"),
    "cp 2 x dp_shard 2, degree 4": layout(4, "cp", "dp_shard"),
    "tp 2 x cp 2, degree 4": layout(4, "tp", "cp"),
    "dp_shard 4, degree 2, 2 experts": layout(2, ranks=4, keys=TWO_EXPERTS),
    "tp 2 x dp_shard 2, degree 1, 2 experts": layout(1, "tp", "dp_shard", keys=TWO_EXPERTS),
    "pp 2 x dp_shard 2, degree 2": layout(2, "pp", "dp_shard"),
    "pp 2 interleaved x dp_shard 2, degree 2": layout(2, "pp interleaved", "dp_shard"),
    "pp 2 zero bubble x dp_shard 2, degree 2": layout(2, "pp zero bubble", "dp_shard"),
    "pp 2 x tp 2, degree 2": layout(2, "pp", "tp"),
    "dp_shard 2, degree 2, offload": layout(2, "dp_shard", "CPU offload"),
    "dp_shard 2, degree 2, Muon": layout(2, "dp_shard", "Muon"),
    "dp_shard 4, degree 2, Muon": layout(2, "Muon", ranks=4),
    "tp 2, degree 2, Muon": layout(2, "tp", "Muon"),
    "dp_shard 4, degree 2, 2 experts, Muon": layout(2, "Muon", ranks=4, keys=TWO_EXPERTS),
    "dp_shard 2, degree 2, 8-bit state": layout(2, "dp_shard", "AdamW with 8-bit state"),
    "dp_shard 4, degree 2, 8-bit state": layout(2, "AdamW with 8-bit state", ranks=4),
    "dp_shard 2, degree 2, clip by tensor": layout(2, "dp_shard", keys=("--training.clip=tensor",)),
    "dp_shard 2, degree 2, compile": layout(2, "dp_shard", "compile"),
    "tp 2, degree 1, compile": layout(1, "tp", "compile"),
    "dp_shard 2, degree 2, compile, full activation checkpointing": layout(
        2, "dp_shard", "compile, full activation checkpointing"
    ),
    "dp_shard 2, degree 2, compile, memory_budget": layout(2, "dp_shard", "compile, memory_budget"),
    "tp 2, degree 2, float8 rowwise": layout(2, "tp", "float8 rowwise"),
    "dp_shard 4, degree 2, deepseek_v3": layout(2, ranks=4, keys=DEEPSEEK),
    "dp_shard 2, degree 2, all_to_all": layout(2, "dp_shard", keys=ALL_TO_ALL),
    "dp_shard 4, degree 4, gather": layout(4, ranks=4, keys=GATHER),
    "tp 2, degree 2, all_to_all": layout(2, "tp", keys=ALL_TO_ALL),
    "tp 2 x dp_shard 2, degree 4, gather": layout(4, "tp", "dp_shard", keys=GATHER),
    "cp 2 x dp_shard 2, degree 4, gather": layout(4, "cp", "dp_shard", keys=GATHER),
    "pp 2 zero bubble x dp_shard 2, degree 2, all_to_all": layout(
        2, "pp zero bubble", "dp_shard", keys=ALL_TO_ALL
    ),
    "dp_shard 2, degree 2, full activation checkpointing, all_to_all": layout(
        2, "dp_shard", "full activation checkpointing", keys=ALL_TO_ALL
    ),
    "dp_shard 2, degree 2, compile, all_to_all": layout(2, "dp_shard", "compile", keys=ALL_TO_ALL),
    "dp_shard 2, degree 2, deepseek_v3, bias": layout(2, "dp_shard", keys=(*DEEPSEEK, *BIAS)),
    "dp_shard 4, degree 4, deepseek_v3, bias": layout(4, ranks=4, keys=(*DEEPSEEK, *BIAS)),
    "dp_shard 2, degree 2, deepseek_v3, compile": layout(2, "dp_shard", "compile", keys=DEEPSEEK),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Runs:
    return Runs(tmp_path_factory.mktemp("expert_parallel"), corpus)


@pytest.mark.parametrize("name", sampled(LAYOUTS, {"dp_shard 2, degree 2"}))
def test_a_layout_trains_as_one_process(runs: Runs, name: str) -> None:
    runs.assert_equal(name, LAYOUTS[name], STEPS)


def train_with(owner: Any, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Train on a rank with a function of a module or class replaced."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, function)
        train_on_rank(*args)


def as_if_sorted(counts_SL: torch.Tensor, num_rows: int) -> torch.Tensor:
    return torch.arange(num_rows)


def train_without_sorting(*args: Any) -> None:
    train_with(expert_parallel, "_order_by_expert", as_if_sorted, args)


def without_sum(y_MD: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    return y_MD.chunk(group.size())[group.rank()].clone()


def train_without_the_sum_over_ranks(*args: Any) -> None:
    train_with(expert_parallel, "_sum_and_scatter", without_sum, args)


def train_without_the_routers_sum(*args: Any) -> None:
    train_with(tensor_parallel, "_local_with_summed_gradient", DTensor.to_local, args)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "program"),
    [
        ("dp_shard 2, degree 2, all_to_all", train_without_sorting),
        ("dp_shard 2, degree 2", train_without_the_sum_over_ranks),
        ("tp 2, degree 2", train_without_the_routers_sum),
    ],
)
def test_controls_fail(runs: Runs, name: str, program: Callable[..., None]) -> None:
    """Rows that arrive are taken as sorted by expert; the experts' outputs are not summed over ranks; the
    router's gradient is not summed over the tensor-parallel ranks."""
    with pytest.raises(AssertionError) as e:
        runs.assert_equal(program.__name__, LAYOUTS[name], STEPS, program)
    assert "Traceback" not in str(e.value), "the run itself failed"


def first_experts(router: Any, scores_NE: torch.Tensor) -> torch.Tensor:
    return torch.arange(router.num_chosen).expand(len(scores_NE), -1)


def train_with_two_experts(*args: Any) -> None:
    train_with(Router, "choose", first_experts, args)


@pytest.mark.parametrize(
    "name",
    sampled(
        [
            "dp_shard 2, degree 2",
            "dp_shard 2, degree 2, all_to_all",
            "dp_shard 4, degree 4",
            "dp_shard 4, degree 4, gather",
            "tp 2, degree 2",
        ],
        set(),
    ),
)
def test_ranks_without_tokens(tmp_path: Path, corpus: Path, name: str) -> None:
    """All tokens go to the first two experts, so that other ranks get none."""
    Runs(tmp_path, corpus, train_with_two_experts).assert_equal(name, LAYOUTS[name], STEPS)


HOPS = {  # layouts, each for some more steps; None: one process
    "other degrees": [
        "dp_shard 2, degree 2",
        None,
        "dp_shard 4, degree 4",
        "tp 2, degree 2",
        "tp 2, degree 1",
    ],
    "from a pipeline": ["pp 2 x dp_shard 2, degree 2", "dp_shard 4, degree 2"],
    "Muon": ["dp_shard 2, degree 2, Muon", "tp 2, degree 2, Muon", "dp_shard 4, degree 2, Muon"],
    "8-bit state": ["dp_shard 2, degree 2, 8-bit state", "dp_shard 4, degree 2, 8-bit state"],
    "bias": ["dp_shard 2, degree 2, deepseek_v3, bias", None, "dp_shard 4, degree 4, deepseek_v3, bias"],
}


@pytest.mark.full
@pytest.mark.parametrize("name", HOPS)
def test_a_run_resumes_on_other_degrees(runs: Runs, name: str) -> None:
    """With the optimizer's state: without it, the weights would differ."""
    alone = Part(1, [key for key in LAYOUTS[HOPS[name][0]].keys if key.startswith(NUMERIC)])
    for i, hop in enumerate(HOPS[name]):
        part, steps = alone if hop is None else LAYOUTS[hop], STEPS + i
        ranks.run(part.ranks, train_on_rank, runs.folder, runs.corpus, part, name, steps)
    runs.compare(name, part, steps)


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    ["dp_shard 4, degree 2", "tp 2 x dp_shard 2, degree 2", "dp_shard 4, degree 4, deepseek_v3, bias"],
)
def test_a_run_resumes_bit_for_bit_on_its_layout(runs: Runs, name: str) -> None:
    part = LAYOUTS[name]
    for run, hops in (("straight", [STEPS]), ("in hops", [2, STEPS])):
        for steps in hops:
            ranks.run(part.ranks, train_on_rank, runs.folder, runs.corpus, part, f"{name} {run}", steps)
    straight, in_hops = (
        job_of(runs.folder, runs.corpus, part, f"{name} {run}", STEPS) for run in ("straight", "in hops")
    )
    assert_same(in_hops, straight)


@pytest.mark.full
@pytest.mark.parametrize(("kind", "name"), [("qwen3_moe", "tp"), ("deepseek_v3", "dp_shard")])
def test_the_files_of_hugging_face_are_the_same_before_and_after(
    tmp_path: Path, corpus: Path, kind: str, name: str
) -> None:
    """A run under expert parallel begins with weights from transformers, trains one step that moves no
    weight, and exports."""
    model = family(**VARIANTS[kind])
    hugging_face(model).save_pretrained(tmp_path / "theirs")
    part = Part(
        2,
        [
            *keys_of(model),
            *AXES[name].keys,
            "--parallelism.expert_parallel_degree=2",
            f"--checkpoint.initial_load_path={tmp_path / 'theirs'}",
            "--optimizer.lr=1e-30",
        ],
    )
    ranks.run(2, train_on_rank, tmp_path, corpus, part, "run", 1)
    assert cli.run(["export", str(tmp_path / "run"), str(tmp_path / "exported"), "--dtype=float32"]) == 0
    before, after = (tensors_in(tmp_path / folder) for folder in ("theirs", "exported"))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.full
def test_adapters_train_as_in_one_process(tmp_path: Path, corpus: Path) -> None:
    base = job_of(tmp_path, corpus, Part(1, MODEL), "base", 1)
    train(base)
    adapters = ("--lora.enable", f"--checkpoint.initial_load_path={base.folder / 'checkpoint'}")
    for part, name in (
        (layout(2, "dp_shard", keys=adapters), "two"),
        (Part(1, [*MODEL, *adapters]), "alone"),
    ):
        ranks.run(part.ranks, train_on_rank, tmp_path, corpus, part, name, STEPS)
    two, alone = (metrics_of(make_job(tmp_path, corpus, name=name)) for name in ("two", "alone"))
    for key in ("train/loss", "train/grad_norm"):
        assert [row[key] for row in two] == pytest.approx([row[key] for row in alone], rel=1e-4)
    assert alone[-1]["train/loss"] < alone[0]["train/loss"]
