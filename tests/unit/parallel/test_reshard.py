"""Whether FSDP keeps gathered weights for the backward: one rule for runs and plans."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import blind_points, plan_errors
from titanlite.attention.sdpa import SDPA
from titanlite.job import Job, load_job
from titanlite.lab.cards import CARDS, GIB, Cluster
from titanlite.lab.memory import at_most, rank_memory
from titanlite.lab.planned import planned_run
from titanlite.mesh import ALONE
from titanlite.optim.base import Optimizer
from titanlite.parallel import reshard
from titanlite.parallel.reshard import LITTLE, StepMemory

LARGE = 1000 * GIB
SMALL = 60 * GIB  # 5% are less than the weights of the blocks
EXPERTS = ["--model.name=qwen3_moe", "--model.flavor=30B-A3B"]


def job_of(*overrides: str) -> Job:
    """llama3_8b with eight blocks."""
    return load_job("train_configs/llama3_8b.toml", ["--model.overrides.n_layers=8", *overrides], None)


def memory_of(*overrides: str, gpus: int = 4) -> StepMemory:
    job = job_of(*overrides)
    return job.step_memory(job.build_on_meta(), gpus, torch.bfloat16)


def recorded() -> dict[str, tuple[Job, str, int]]:
    """The recorded runs of several GPUs on which the choice depends: job, GPU and number of GPUs."""
    cases = dict[str, tuple[Job, str, int]]()
    for run in plan_errors.recorded():
        if run.gpus > 1:
            job = load_job(plan_errors.config_path(run), run.overrides, None)
            cases[f"{run.file} {run.case}"] = job, "H100" if "_h100" in run.file else "H200", run.gpus
    for point in blind_points.points():
        if point.gpus > 1:
            cases[point.name] = blind_points.job_of(point)[0], "H200", point.gpus
    degrees = {name: job.parallelism.degrees(gpus) for name, (job, _, gpus) in cases.items()}
    return {n: cases[n] for n, d in degrees.items() if d.pp == 1 and d.dp_shard * d.cp > 1}


@pytest.mark.full
def test_the_recorded_runs_choose_as_by_the_plan_which_counts_tensors() -> None:
    """All of them fit with kept weights. With less memory than the plan counts for it, none keeps them."""
    cases = recorded()
    assert len(cases) > 40
    for name, (job, gpu, gpus) in cases.items():
        cluster = Cluster(next(card for card in CARDS if card.name == gpu), gpus)
        run = planned_run(
            replace(job, parallelism=replace(job.parallelism, fsdp_reshard_after_forward="never")), cluster
        )
        default = replace(job.parallelism, fsdp_reshard_after_forward="default")
        memory = run.step_memory
        memory = replace(memory, settings=replace(memory.settings, parallelism=default))
        assert not memory.reshard(run.device_bytes).frees, name
        ranks = rank_memory(run)
        assert at_most(ranks) <= run.device_bytes, name
        peak = max(rank.peak.total for rank in ranks)
        assert peak < memory.num_bytes() < 2 * peak + 4 * GIB, name


def test_weights_are_kept_up_to_the_estimate() -> None:
    memory = memory_of()
    need = int(memory.num_bytes()) + 1
    fits, exceeds = memory.reshard(need), memory.reshard(need - GIB // 100)
    assert (fits.frees, exceeds.frees) == (False, True)
    size = f"{need / GIB:.1f} of the GPU's {need / GIB:.1f} GiB"
    assert fits.reason == f"with them, the run is estimated to need up to {size}"
    chosen = {
        key: memory_of(f"--parallelism.fsdp_reshard_after_forward={key}") for key in ("always", "never")
    }
    assert chosen["always"].reshard(LARGE).frees
    assert not chosen["never"].reshard(1).frees


@pytest.mark.parametrize(
    ("overrides", "more"),
    [
        (["--ema.enable"], 4 * 1 / 4),
        (["--optimizer.state_dtype=int8"], (2.125 - 8) / 4),
        (
            ["--training.global_batch_size=8", "--parallelism.fsdp_reduce=step"],
            4.0,
        ),  # two micro-batches: gradients before their reduction
        (["--training.global_batch_size=8", "--parallelism.fsdp_reduce=micro_batch"], 0.0),
    ],
)
def test_each_byte_per_parameter_counts(overrides: list[str], more: float) -> None:
    memory = memory_of("--training.local_batch_size=1")
    size = sum(p.numel() for p in memory.net.parameters())
    changed = memory_of("--training.local_batch_size=1", *overrides)
    assert changed.num_bytes() - memory.num_bytes() == pytest.approx(1.1 * more * size, rel=0.01, abs=1)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ([*EXPERTS, "--parallelism.expert_parallel_degree=2"], "axes of experts"),
        ([*EXPERTS, "--parallelism.tensor_parallel_degree=4"], "axes of experts"),  # one shard of the others
        (["--training.enable_cpu_offload"], "enable_cpu_offload"),
        (["--attention.backend=sdpa"], "attention"),
        (["--attention.sdpa_kernel=math"], "attention"),
        (["--model.name=qwen3_5", "--model.flavor=2B"], "linear attention"),
    ],
)
def test_runs_whose_memory_cannot_be_estimated_free_the_weights(overrides: list[str], reason: str) -> None:
    choice = memory_of(*overrides).reshard(GIB)
    assert choice.frees
    assert reason in choice.reason


def test_an_optimizer_that_does_not_tell_its_state_keeps_only_weights_that_take_little() -> None:
    class Other(Optimizer, name="other_of_test_reshard"):
        def build(self, model: Any, mesh: Any) -> torch.optim.Optimizer:
            raise NotImplementedError

    class Told(Other, name="told_of_test_reshard"):
        def state_bytes(self, parameter: torch.Tensor, rule: str) -> float:
            return 100.0

    memory = replace(memory_of(), optimizer=Other())
    weights = 2 * sum(p.numel() for p in memory.net.parameters())
    assert "other_of_test_reshard" in memory.reshard(SMALL).reason
    assert memory.reshard(int(weights / LITTLE) - 20).frees
    kept = memory.reshard(int(weights / LITTLE) + 20)
    assert (kept.frees, kept.reason) == (False, "they take at most 5% of the GPU's memory")
    told = replace(memory, optimizer=Told())
    assert "estimated" in told.reshard(SMALL).reason
    assert told.num_bytes() > memory.num_bytes() + 90 * weights / 2 / 4


def test_other_runs_free_the_weights() -> None:
    memory = memory_of()
    settings = replace(memory.settings, attention=SDPA())
    assert replace(memory, settings=settings).reshard(SMALL).frees
    assert memory_of().reshard(0).frees  # a CPU
    assert not memory_of().reshard(LARGE).frees  # control


@pytest.mark.parametrize(
    ("overrides", "gpus", "reason"),
    [
        (["--parallelism.tensor_parallel_degree=2"], 2, "one shard"),
        (["--parallelism.pipeline_parallel_degree=2", "--parallelism.fsdp_reduce=step"], 4, "micro-batch"),
    ],
)
def test_weights_are_kept_where_freeing_them_gains_nothing(
    overrides: list[str], gpus: int, reason: str
) -> None:
    choice = memory_of(*overrides, gpus=gpus).reshard(1)
    assert not choice.frees
    assert reason in choice.reason


def ranks(device: str, smallest: int) -> Any:
    """A rank whose GPU is large, among ranks of which one has a GPU with `smallest` bytes."""

    def all_reduce(own: int, merge: Any) -> int:
        assert own == LARGE
        return merge(own, smallest)

    return SimpleNamespace(device=torch.device(device), all_reduce=all_reduce)


@pytest.mark.parametrize(
    ("smallest", "choice", "line"),
    [
        (LARGE, "never", "FSDP keeps gathered weights for the backward: with them, the run is estimat"),
        (
            10 * GIB,
            "always",
            "FSDP frees gathered weights after the forward: with them, the run is estimated ",
        ),
    ],
)
def test_a_run_decides_by_the_smallest_gpu_and_says_so(
    smallest: int, choice: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(reshard.logger, "info", lines.append)
    own = SimpleNamespace(total_memory=LARGE)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: own)
    memory = memory_of()
    parallelism = memory.settings.parallelism
    mesh: Any = SimpleNamespace(device_mesh="some")
    resolved = memory.resolved(mesh, ranks("cuda", smallest))
    assert resolved == replace(parallelism, fsdp_reshard_after_forward=choice)
    (message,) = lines
    assert message.startswith(line)
    assert memory.resolved(mesh, ranks("cpu", smallest)) is parallelism
    assert memory.resolved(ALONE, ranks("cuda", smallest)) is parallelism
