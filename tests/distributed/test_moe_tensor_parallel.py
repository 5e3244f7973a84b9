"""Tensor parallel trains OLMoE, whose norms are over all heads, and DeepSeek-V3, whose attention has latent
vectors, as one process does: losses, gradient norms and, name by name, the weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tests.support.gradients import gradients, on_rank
from tests.support.layout_runs import Runs, train_on_rank
from tests.support.layouts import AXES, OPTIONS, Part
from tests.support.tiers import sampled
from titanlite.models.lora import LoRA
from titanlite.parallel import tensor_parallel
from titanlite.torch_compat import all_reduce

STEPS = 3
FAMILIES = {
    "olmoe": {"hidden_dim": 0, "moe_hidden_dim": 16},
    "deepseek_v3": {
        "n_kv_heads": 4, "head_dim": 12, "rope_head_dim": 4, "v_head_dim": 8, "q_lora_rank": 12,
        "kv_lora_rank": 16, "moe_hidden_dim": 24,
    },
}  # fmt: skip
MORE_OPTIONS = {
    "degree 2": ["--parallelism.expert_parallel_degree=2"],
    "bias": ["--moe.load_balance=bias"],
    "no query rank": ["--model.overrides.q_lora_rank=0"],
    "tied embeddings": ["--model.overrides.tie_word_embeddings=true"],
    "float8": [
        *OPTIONS["float8 rowwise"].keys,
        "--model.overrides.head_dim=32", "--model.overrides.rope_head_dim=16",
        "--model.overrides.v_head_dim=16", "--model.overrides.moe_hidden_dim=64",
        "--model.overrides.q_lora_rank=32", "--model.overrides.kv_lora_rank=32",
    ],
}  # fmt: skip
BOTH = [
    "tp", "tp x dp_shard", "tp x cp", "pp x tp", "tp, degree 2", "tp, Muon", "tp, AdamW with 8-bit state",
    "tp, document masks", "tp, full activation checkpointing", "tp, compile",
]  # fmt: skip
LAYOUTS = [
    *(f"{family}: {rest}" for family in FAMILIES for rest in BOTH),
    *(f"deepseek_v3: tp, {option}" for option in ("bias", "no query rank", "tied embeddings", "float8")),
]


def layout(name: str) -> Part:
    """The layout `FAMILY: AXIS x AXIS, OPTION`, with two ranks along each axis."""
    family, _, rest = name.partition(": ")
    axes, _, option = rest.partition(", ")
    parts = [AXES[axis] for axis in axes.split(" x ")]
    keys = [f"--model.name={family}", "--training.local_batch_size=1"]
    keys += [key for part in parts for key in part.keys]
    keys += OPTIONS[option].keys if option in OPTIONS else []
    keys += [f"--model.overrides.{key}={value}" for key, value in FAMILIES[family].items()]
    return Part(math.prod(part.ranks for part in parts), [*keys, *MORE_OPTIONS.get(option, [])])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Runs:
    return Runs(tmp_path_factory.mktemp("tensor_parallel"), corpus)


@pytest.mark.parametrize("name", sampled(LAYOUTS, {"olmoe: tp"}))
def test_a_layout_trains_as_one_process(runs: Runs, name: str) -> None:
    runs.assert_equal(name, layout(name), STEPS)


@pytest.mark.full
def test_the_gradient_of_adapters_is_that_of_one_process(run_on) -> None:
    lora = LoRA(enable=True, rank=3, alpha=7.0, targets=["self_attn.*", "shared_experts.*"])
    sizes = {**FAMILIES["deepseek_v3"], "n_experts": 8, "n_experts_per_token": 2}
    same = {"family": "deepseek_v3", "shape": sizes, "lora": lora}
    actual, whole = run_on(2, on_rank, 2, 1, {**same, "tp": 2})[0], gradients(1, 0, 1, **same)
    assert {f"model.layers.1.self_attn.{name}.lora_A.weight" for name in ("q_a_proj", "kv_b_proj")} <= set(
        whole
    )
    for name, value in whole.items():
        assert torch.allclose(actual[name], value, rtol=1e-4, atol=1e-6), name


class SumWithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return all_reduce(x, "sum", mesh)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def train_without_the_norms_sum(*args: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_parallel, "_sum_over_ranks", SumWithoutGradient.apply)
        train_on_rank(*args)


class GatherWithoutSum(tensor_parallel._GatherOutput):
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(
            lambda module, args, output: tensor_parallel._gather(output, device_mesh).to_local()
        )
        return module


def train_without_the_keys_sum(*args: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_parallel, "_GatherOutput", GatherWithoutSum)
        train_on_rank(*args)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "program"),
    [("olmoe: tp", train_without_the_norms_sum), ("deepseek_v3: tp", train_without_the_keys_sum)],
)
def test_controls_fail(runs: Runs, name: str, program: Callable[..., None]) -> None:
    """The gradient of the sum of squares, or of the key that all heads share, is that of a rank's heads."""
    with pytest.raises(AssertionError) as e:
        runs.assert_equal(program.__name__, layout(name), STEPS, program)
    assert "Traceback" not in str(e.value), "the run itself failed"
