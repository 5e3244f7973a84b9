"""A rank that computes one wrong bit is named, and the run goes back to a checkpoint of before. Without a
fault, checks for faults change nothing. The control has a fault in a step without a check."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.support.golden import EXPERTS
from tests.support.jobs import make_job
from tests.support.runs import assert_same, train_on_rank
from tests.support.tiers import full
from titanlite import train as trainer
from titanlite.checkpoint import commit
from titanlite.config.component import ConfigError
from titanlite.errors import SilentFault
from titanlite.mesh import local_shard
from titanlite.metrics import silent_faults
from titanlite.parallel.sharded_model import ShardedModel

EVERY_2 = "--guard.fault_check_freq=2"
KEYS = ["--checkpoint.interval=1", "--checkpoint.keep_latest_k=0", "--training.steps=6", EVERY_2]
REPLICAS = "--parallelism.data_parallel_replicate_degree="
BF16 = "--training.mixed_precision_param=bfloat16"
MOE = ["--model.name=qwen3_moe", *EXPERTS]
BROKEN = 1  # the rank with the fault, or the only rank


def flip(tensor: torch.Tensor) -> None:
    """Flip one bit in the middle of the mantissa of one element."""
    integers = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    tensor.detach().view(-1)[:1].view(integers).bitwise_xor_(1 << {2: 4, 4: 14}[tensor.element_size()])


def train_broken(
    folder: Path, corpus: Path, keys: list[str], ranks: int, place: str, steps: list[int], times: int = 99
) -> str:
    """Train on one rank of a run in which rank BROKEN has a wrong bit in each of `steps`, at most `times`
    times in a check: in the output of a linear layer or of the embedding, which is not compiled, or in the
    gradient of a linear layer's output. Or a weight has a wrong bit from the first of `steps` on. Returns the
    error that ends the run."""
    rank = dist.get_rank() if dist.is_initialized() else BROKEN
    runs: list[Any] = []
    left = [times]
    build, after_step, fingerprint = trainer.build, ShardedModel.after_step, ShardedModel.fingerprint

    def is_broken() -> bool:
        return rank == BROKEN and bool(runs) and runs[0].state.step in steps and left[0] > 0

    def flip_output(layer: Any, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        if not is_broken():
            return None
        output = output.clone()
        flip(output.view(-1))
        return output

    def flip_gradient(layer: Any, args: Any, output: torch.Tensor) -> None:
        def flipped(gradient: torch.Tensor) -> torch.Tensor:
            gradient = gradient.clone()
            flip(gradient)
            return gradient

        if is_broken() and output.requires_grad:
            output.register_hook(flipped)

    def building(*args: Any) -> Any:
        runs.append(build(*args))
        if place != "weight":
            name = "embed_tokens" if place == "embedding" else "layers.1.self_attn.o_proj"
            hook = flip_gradient if place == "gradient" else flip_output
            runs[0].model.net.get_submodule(f"model.{name}").register_forward_hook(hook)
        return runs[0]

    def ending_step(self: ShardedModel, applied: torch.Tensor) -> None:
        after_step(self, applied)
        if place == "weight" and is_broken() and runs[0].state.step == steps[0]:
            flip(local_shard(self.net.get_parameter("model.norm.weight")))

    def computing(*args: Any) -> Any:
        digests = fingerprint(*args)
        left[0] -= is_broken()
        return digests

    with (
        patch.object(trainer, "build", building),
        patch.object(ShardedModel, "after_step", ending_step),
        patch.object(ShardedModel, "fingerprint", computing),
    ):
        try:
            trainer.train(make_job(folder, corpus, *keys, world_size=ranks))
        except SilentFault as e:
            return str(e)
    return ""


def saved_steps(run_folder: Path) -> list[int]:
    return [step for step, _ in commit.list_committed(run_folder / "checkpoint")]


def events(run_folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_folder / "events.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("ranks", "keys", "place", "times", "named"),
    [
        (3, [], "output", 99, [1]),
        full(3, [], "gradient", 99, [1]),
        full(3, [], "gradient", 1, [1]),
        full(3, [f"{REPLICAS}3"], "weight", 99, [1]),
        full(3, [BF16, *MOE], "output", 99, [1]),
        full(3, ["--training.same_bits_on_any_ranks"], "output", 99, [1]),
        full(3, ["--activation_checkpoint.mode=full", "--compile.enable"], "embedding", 99, [1]),
        full(4, [f"{REPLICAS}2"], "output", 1, [1]),
        full(2, ["--training.local_batch_size=2"], "output", 1, [1]),
        full(2, [], "gradient", 99, [0, 1]),
        full(2, [f"{REPLICAS}2"], "weight", 99, [0, 1]),
    ],
)
def test_the_rank_with_a_wrong_bit_is_named(
    tmp_path: Path,
    corpus: Path,
    run_on: Callable[..., Any],
    ranks: int,
    keys: list[str],
    place: str,
    times: int,
    named: list[int],
) -> None:
    """The fault begins at step 3; steps 2 and 4 are checked. Of two ranks that each agree with themselves,
    both are named."""
    keys = [*KEYS, f"--training.global_batch_size={4 * ranks}", *keys]
    errors = run_on(ranks, train_broken, tmp_path, corpus, keys, ranks, place, [3, 4, 5, 6], times)
    assert len(set(errors)) == 1, "all ranks end with the same error"
    assert [rank for rank in range(ranks) if f"rank {rank} on " in errors[0]] == named
    assert ("wrong results of rank 1" in errors[0]) == (named == [1])
    assert "since step 2, the check before, may be wrong" in errors[0]
    assert "goes back to step 2" in errors[0]
    assert saved_steps(tmp_path / "run") == [1, 2]
    (event,) = [event for event in events(tmp_path / "run") if event["event"] == "fault"]
    assert event["step"] == 4
    assert event["ranks"] == ", ".join(map(str, named))
    assert event["reason"] in errors[0]


@pytest.mark.parametrize(
    ("ranks", "keys"),
    [
        full(2, []),
        full(1, []),
        full(1, ["--training.same_bits_on_any_ranks", BF16]),
        full(2, [BF16, *MOE, "--moe.load_balance=global", "--training.local_batch_size=2"]),
        full(3, ["--training.same_bits_on_any_ranks", "--training.local_batch_size=2"]),
        full(3, [f"{REPLICAS}3", BF16]),
        full(4, [f"{REPLICAS}2", "--ema.enable"]),
        full(2, ["--compile.enable", "--data.packing=best_fit", "--data.mask_documents"]),
        full(
            2,
            ["--optimizer.name=muon", "--training.clip=tensor", "--training.mixed_precision_reduce=bfloat16"],
        ),
        full(2, ["--float8.enable", "--float8.emulate", "--float8.filter_fqns=[]"]),
        full(2, ["--loss.name=chunked_cross_entropy", "--loss.chunk_tokens=24", "--metrics.detail_freq=2"]),
        full(2, ["--data.num_workers=1", "--checkpoint.async_mode=async", "--validation.enable"]),
    ],
)
def test_checks_for_faults_change_nothing(
    tmp_path: Path, corpus: Path, run_on: Callable[..., Any], ranks: int, keys: list[str]
) -> None:
    keys = [f"--training.global_batch_size={8 * ranks}", "--training.steps=12", *keys]
    for name, key in (("with", ["--guard.fault_check_freq=1"]), ("without", [])):
        run_on(ranks, train_on_rank, tmp_path, corpus, [*keys, *key], name, ranks)
    checked, plain = (
        make_job(tmp_path, corpus, *keys, world_size=ranks, name=n) for n in ("with", "without")
    )
    assert_same(checked, plain)
    assert all(event["event"] != "fault" for event in events(checked.folder))


@pytest.mark.full
def test_a_fault_in_a_step_without_a_check_is_not_found(
    tmp_path: Path, corpus: Path, run_on: Callable[..., Any]
) -> None:
    assert run_on(2, train_broken, tmp_path, corpus, KEYS, 2, "output", [3]) == ["", ""]
    assert saved_steps(tmp_path / "run") == [1, 2, 3, 4, 5, 6]


def test_a_single_rank_differs_from_itself(tmp_path: Path, corpus: Path) -> None:
    error = train_broken(tmp_path, corpus, KEYS, 1, "gradient", [4], times=1)
    assert "wrong results of rank 0 on " in error


def test_the_same_command_continues_from_before_the_fault(tmp_path: Path, corpus: Path) -> None:
    assert train_broken(tmp_path / "a", corpus, KEYS, 1, "output", [5, 6], times=1)
    assert train_broken(tmp_path / "b", corpus, KEYS, 1, "output", []) == ""
    assert saved_steps(tmp_path / "a/run") == [1, 2, 3, 4], "the last step is checked before it is saved"
    assert train_broken(tmp_path / "a", corpus, KEYS, 1, "output", []) == ""
    jobs = [make_job(tmp_path / name, corpus, *KEYS) for name in "ab"]
    assert_same(*jobs)


def test_retention_keeps_a_checkpoint_of_the_check_before(tmp_path: Path, corpus: Path) -> None:
    """The fault is found after step 16, the last one of steps that are all saved."""
    keys = [*KEYS, "--guard.fault_check_freq=8", "--checkpoint.keep_latest_k=2", "--training.steps=16"]
    error = train_broken(tmp_path, corpus, keys, 1, "output", [16], times=1)
    assert "goes back to step 8, the newest healthy checkpoint" in error
    assert saved_steps(tmp_path / "run") == [8]


def test_a_run_that_saves_nothing_ends_too(tmp_path: Path, corpus: Path) -> None:
    keys = [*KEYS, "--no-checkpoint.enable"]
    error = train_broken(tmp_path, corpus, keys, 1, "output", [4], times=1)
    assert "no healthy checkpoint was saved before, and the next start begins at step 1" in error


def train_on_two_kinds(folder: Path, corpus: Path) -> str:
    """The error that ends a run whose ranks have different devices."""
    with patch.object(silent_faults, "device_name", lambda device: f"kind {dist.get_rank()}"):
        try:
            train_on_rank(folder, corpus, [EVERY_2], "run", 2)
        except ConfigError as e:
            return str(e)
    return ""


def test_devices_of_different_kinds_are_refused(
    tmp_path: Path, corpus: Path, run_on: Callable[..., Any]
) -> None:
    for error in run_on(2, train_on_two_kinds, tmp_path, corpus):
        assert "devices of different kinds: kind 0, kind 1" in error


@pytest.mark.parametrize(
    ("keys", "ranks", "message"),
    [
        (["--no-training.deterministic"], 1, "set training.deterministic = true"),
        (["--parallelism.tensor_parallel_degree=2"], 2, "not with parallelism.tensor_parallel_degree = 2"),
        (["--training.enable_cpu_offload"], 1, "not with training.enable_cpu_offload = true"),
    ],
)
def test_refused(tmp_path: Path, corpus: Path, keys: list[str], ranks: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        make_job(tmp_path, corpus, EVERY_2, *keys, world_size=ranks)
    assert "guard.fault_check_freq" in str(error.value)
