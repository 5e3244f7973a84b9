"""Adapters on every layout: gradients equal those of one process, base weights do not change, and runs resume
to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.gradients import gradients, on_rank
from tests.support.tiers import full
from titanlite.models.lora import LoRA
from titanlite.parallel import tensor_parallel

# Among the targets are layers with column-wise and row-wise shards.
LORA: dict[str, Any] = {
    "lora": LoRA(enable=True, rank=3, alpha=7.0, targets=["[qv]_proj", "o_proj", "mlp.*"])
}
QWEN2: dict[str, Any] = {"family": "qwen2", "shape": {"head_dim": 16}}


def assert_same(actual: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == whole.keys()
    assert {
        "model.layers.1.self_attn.o_proj.lora_A.weight",
        "model.layers.0.mlp.up_proj.lora_B.weight",
    } <= set(whole)
    assert not {"model.norm.weight", "model.layers.0.self_attn.k_proj.lora_A.weight"} & set(whole)
    for name, value in whole.items():
        assert value.norm() > 0, name
        assert torch.allclose(actual[name], value, rtol=1e-4, atol=1e-7), name


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (2, {"tp": 2}), full(2, {}), full(2, {"cp": 2}), full(4, {"dp_replicate": 2}),
        full(4, {"tp": 2, "cp": 2}),
        full(4, {"tp": 2}), full(2, {"tp": 2, "compile": "aot_eager"}), full(2, {"compile": "aot_eager"}),
        full(2, {"activation_checkpoint": "full"}), full(2, {"activation_checkpoint": "selective"}),
        full(2, {"tp": 2, "activation_checkpoint": "selective", "ac_option": "norms+attention"}),
        full(2, {"tp": 2, "activation_checkpoint": "full", "compile": "aot_eager"}),
        full(2, {"reduce": "micro_batch"}), full(2, {"tp": 2, **QWEN2}),
    ],
    ids=str,
)  # fmt: skip
def test_gradient_is_the_same_on_every_layout(run_on, world_size: int, layout: dict[str, Any]) -> None:
    family = {key: layout[key] for key in ("family", "shape") if key in layout}
    whole = gradients(1, 0, 1, **LORA, **family)
    for actual in run_on(world_size, on_rank, world_size, 2, {**LORA, **layout}):
        assert_same(actual, whole)


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        {}, {"tp": 2}, {"activation_checkpoint": "full", "compile": "aot_eager"},
        {"schedule": "Interleaved1F1B", "layers": 4},
    ],
    ids=str,
)  # fmt: skip
def test_gradient_is_the_same_in_a_pipeline(run_on, layout: dict[str, Any]) -> None:
    layout = {"tied": False, **LORA, **layout}
    parts = run_on(4, on_rank, 4, 2, {"pp": 2, **layout})
    whole = gradients(1, 0, 1, tied=False, **LORA, layers=layout.get("layers", 2))
    assert_same({name: value for part in parts for name, value in part.items()}, whole)


def on_rank_without_sums() -> dict[str, torch.Tensor]:
    """The gradient if the tensor-parallel ranks' summands for replicated matrices were not added."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("COLWISE_ADAPTER", "ROWWISE_ADAPTER"):
            placements = getattr(tensor_parallel, name)
            wrong = placements._replace(a_gradient=placements.a, b_gradient=placements.b)
            patch.setattr(tensor_parallel, name, wrong)
        return on_rank(2, 2, {**LORA, "tp": 2})


def test_control_gradients_of_replicated_matrices_have_to_be_added(run_on) -> None:
    whole, actual = gradients(1, 0, 1, **LORA), run_on(2, on_rank_without_sums)[0]
    wrong = {name for name in whole if not torch.allclose(actual[name], whole[name], rtol=1e-3, atol=1e-6)}
    replicated = {
        name
        for name in whole
        if name.endswith("o_proj.lora_B.weight")
        or name.endswith(("q_proj.lora_A.weight", "up_proj.lora_A.weight"))
    }
    assert replicated <= wrong
    assert not any(name.endswith(("q_proj.lora_B.weight", "o_proj.lora_A.weight")) for name in wrong)
