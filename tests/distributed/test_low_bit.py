"""AdamW with 8-bit and bfloat16 state on every layout: given equal gradients, weights and state have the bits
of one process, and a checkpoint of one layout resumes on any other with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.support import gradients, ranks
from tests.support.checkpoints import open_run, state_of
from tests.support.jobs import make_job, metrics_of, tiny_arguments
from tests.support.runs import CP, FOUR_MICRO_BATCHES, PP, TP, UNTIED, run_in_hops, train_on_rank
from titanlite.checkpoint.state import flattened
from titanlite.config.component import ConfigError
from titanlite.mesh import local_shard
from titanlite.optim import low_bit
from titanlite.optim.adamw import AdamW, StateDtype
from titanlite.optim.base import guarded_step, set_lr
from titanlite.optim.muon import Muon
from titanlite.parallel.initialize import fill_normal
from titanlite.parallel.sharded_model import ShardedModel
from titanlite.tools import config
from titanlite.torch_compat import plain_tensor

# Three shards of rows are uneven, and so are two x two shards of the vocabulary. Tensor parallel leaves one
# block of 64 values in each row of down_proj.
SHAPE = {"dim": 64, "hidden_dim": 128, "head_dim": 32, "vocab_size": 250}
CONFIG = {"lr": 0.01, "weight_decay": 0.1, "beta2": 0.9}
FSDP_TP = (4, {"tp": 2})
LAYOUTS = {
    "FSDP 2": (2, {}),
    "FSDP 3": (3, {}),
    "FSDP 4": (4, {}),
    "HSDP 2 x 2": (4, {"dp_replicate": 2}),
    "TP 2": (2, {"tp": 2}),
    "FSDP 2 x TP 2": FSDP_TP,
    "TP 2 x PP 2": (4, {"tp": 2, "pp": 2}),
    "CP 2": (2, {"cp": 2}),
    "CP 2 x TP 2": (4, {"cp": 2, "tp": 2}),
    "FSDP 2, gathered in float8": (2, {"float8": "tensorwise"}),
}


def build(world_size: int, layout: dict[str, Any], state_dtype: StateDtype) -> tuple[ShardedModel, Any]:
    rank = dist.get_rank() if world_size > 1 else 0
    model = gradients.build(world_size, rank, shape=SHAPE, tied=False, **layout)
    wrapped = [p for p in model.net.parameters() if plain_tensor(p) is not p]
    assert bool(wrapped) == ("float8" in layout)
    config = Muon if layout.get("muon") else AdamW
    return model, config(state_dtype=state_dtype, **CONFIG).build(model.net, model.mesh)


def take_steps(model: ShardedModel, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Steps with gradients that follow from the parameter's name and the step; the third step is skipped."""
    for step in steps:
        set_lr(optimizer, 1 / step)
        for name, p in model.net.named_parameters():
            p.grad = torch.zeros_like(p)
            fill_normal(p.grad, name, 0.01, 0.1 * step, seed=step)
            if step == 3:
                local_shard(p.grad).fill_(torch.nan)
        guarded_step(optimizer, torch.tensor(step != 3), torch.tensor(1.5))


def whole_tensors(model: ShardedModel, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The weights and the state of this rank's stages, gathered over its other ranks."""
    tensors = flattened(state_of(model.net, optimizer).tensors()).items()
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in tensors}


def trained(
    world_size: int, layout: dict[str, Any], state_dtype: StateDtype, folder: Path | None, last: int = 4
) -> dict[str, torch.Tensor]:
    """Weights and state after steps 1 to `last`. `folder`: save them there."""
    model, optimizer = build(world_size, layout, state_dtype)
    take_steps(model, optimizer, range(1, last + 1))
    if folder is not None:
        checkpoints = open_run(folder, async_mode="disabled")
        state = state_of(model.net, optimizer, step=last, num_sequences=8 * last, tokens=torch.tensor(80))
        checkpoints.save(state)
        checkpoints.close()
    return whole_tensors(model, optimizer)


def resumed(
    world_size: int, layout: dict[str, Any], state_dtype: StateDtype, folder: Path
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights and state as they were loaded, and after two more steps."""
    model, optimizer = build(world_size, layout, state_dtype)
    checkpoints, state = open_run(folder, async_mode="disabled"), state_of(model.net, optimizer)
    checkpoints.load(state)
    checkpoints.close_after_error()
    loaded = whole_tensors(model, optimizer)
    take_steps(model, optimizer, range(state.step + 1, state.step + 3))
    return loaded, whole_tensors(model, optimizer)


def assert_bits(results: list[dict[str, torch.Tensor]], wanted: dict[str, torch.Tensor]) -> None:
    assert {name for result in results for name in result} == wanted.keys()
    for result in results:
        for name, tensor in result.items():
            assert tensor.dtype == wanted[name].dtype
            assert torch.equal(tensor, wanted[name]), name


@pytest.mark.full
def test_bits_of_one_process_and_a_resume_on_another_layout(tmp_path: Path) -> None:
    world_size, layout = FSDP_TP
    wanted = trained(1, {}, "int8", None)
    assert wanted["optimizer.model.layers.0.mlp.down_proj.weight.exp_avg_scale"].shape == (64, 2)
    assert_bits(ranks.run(world_size, trained, world_size, layout, "int8", tmp_path), wanted)
    results = ranks.run(3, resumed, 3, {}, "int8", tmp_path)
    assert_bits([loaded for loaded, _ in results], wanted)
    assert_bits([after for _, after in results], trained(1, {}, "int8", None, last=6))


@pytest.mark.full
@pytest.mark.parametrize("state_dtype", ["int8", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_bits_of_one_process(layout: str, state_dtype: StateDtype) -> None:
    world_size, options = LAYOUTS[layout]
    results = ranks.run(world_size, trained, world_size, options, state_dtype, None)
    assert_bits(results, trained(1, {}, state_dtype, None))


@pytest.mark.full
def test_embedding_and_head_under_muon_have_the_bits_of_one_process() -> None:
    world_size, layout = FSDP_TP
    wanted = trained(1, {"muon": True}, "int8", None)
    assert wanted["optimizer.model.embed_tokens.weight.exp_avg"].dtype == torch.int8
    assert_bits(ranks.run(world_size, trained, world_size, {**layout, "muon": True}, "int8", None), wanted)


def trained_by_local_size(world_size: int) -> dict[str, torch.Tensor]:
    """Training whose choice of 8-bit state follows from the size of this rank's shard, as torchao's does."""
    low_bit.has_blocks = lambda parameter: local_shard(parameter).numel() % 4096 == 0
    return trained(world_size, {}, "int8", None)


@pytest.mark.full
def test_control_a_choice_by_local_size_has_other_bits() -> None:
    wanted = ranks.run(1, trained_by_local_size, 1)[0]
    ours = ranks.run(3, trained_by_local_size, 3)[0]
    name = "model.model.layers.0.mlp.gate_proj.weight"
    assert not torch.equal(ours[name], wanted[name])


@pytest.mark.full
@pytest.mark.parametrize("first", ["FSDP 4", "FSDP 2 x TP 2", "HSDP 2 x 2"])
def test_a_checkpoint_resumes_on_every_layout(tmp_path: Path, first: str) -> None:
    world_size, layout = LAYOUTS[first]
    ranks.run(world_size, trained, world_size, layout, "int8", tmp_path)
    wanted, wanted_after = (trained(1, {}, "int8", None, last) for last in (4, 6))
    for world_size, layout in [(1, {}), *LAYOUTS.values()]:
        results = ranks.run(world_size, resumed, world_size, layout, "int8", tmp_path)
        assert_bits([loaded for loaded, _ in results], wanted)
        assert_bits([after for _, after in results], wanted_after)


@pytest.mark.full
def test_a_run_over_a_chain_of_layouts_is_near_one_run(tmp_path: Path, corpus: Path) -> None:
    """With the gradients of training, which differ by rounding between layouts."""
    keys = [UNTIED, "--optimizer.state_dtype=int8", "--model.overrides.dim=64"]
    keys += ["--model.overrides.hidden_dim=128", "--model.overrides.head_dim=32"]
    whole = run_in_hops(tmp_path, corpus, [12], *keys, name="whole")
    chain = [(4, [FOUR_MICRO_BATCHES]), (4, [PP, TP]), (2, [CP]), (1, [])]
    for steps, (world_size, layout) in zip((3, 6, 9, 12), chain):
        overrides = [*keys, *layout, f"--training.steps={steps}"]
        ranks.run(world_size, train_on_rank, tmp_path, corpus, overrides, "chain", world_size)
    job = make_job(tmp_path, corpus, *keys, name="chain")
    for ours, theirs in zip(metrics_of(job), metrics_of(whole), strict=True):
        assert ours["data/batch_sha"] == theirs["data/batch_sha"]
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-4)


def test_config_finds_a_block_that_tensor_parallel_would_cut(tmp_path: Path, corpus: Path) -> None:
    wide = ["--model.overrides.dim=64", "--model.overrides.hidden_dim=192", "--training.global_batch_size=-1"]
    keys = [*wide, "--parallelism.tensor_parallel_degree=2", "--ranks=64"]
    arguments = [*tiny_arguments(tmp_path, corpus), *keys]
    with pytest.raises(ConfigError, match=r"state_dtype: .*down_proj.weight has rows of 192 values"):
        config.main([*arguments, "--optimizer.state_dtype=int8"])
    assert config.main(arguments) == 0
