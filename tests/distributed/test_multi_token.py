"""The loss of multi-token prediction and its gradient are the same on every layout as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.gradients import build, gradients, on_rank, uneven_sequences
from tests.support.tiers import full
from titanlite.data.batch import Batch

FAMILY: dict[str, Any] = {
    "family": "deepseek_v3",
    "shape": {
        "n_kv_heads": 4, "head_dim": 12, "rope_head_dim": 4, "v_head_dim": 8, "q_lora_rank": 12,
        "kv_lora_rank": 16, "n_experts": 8, "n_experts_per_token": 2, "moe_hidden_dim": 24,
        "n_mtp_layers": 2,
    },
}  # fmt: skip
EH_PROJ = "model.layers.3.eh_proj.weight"


def differences(actual: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> list[str]:
    assert actual.keys() == whole.keys() >= {"mtp_loss", EH_PROJ}
    return [
        name for name, value in whole.items() if not torch.allclose(actual[name], value, rtol=1e-4, atol=1e-6)
    ]


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (2, {}), full(2, {"tied": False}), full(2, {"tied": False, "tp": 2}),
        full(2, {"tp": 2, "z_loss": 1e-3}), full(2, {"tied": False, "cp": 2}),
        full(2, {"tied": False, "ep": 2}),
        full(4, {"tied": False, "tp": 2, "activation_checkpoint": "full"}), full(4, {"dp_replicate": 2}),
        full(4, {"tied": False, "cp": 2, "activation_checkpoint": "selective"}),
        full(2, {"tied": False, "compile": "aot_eager"}),
        full(2, {"tied": False, "compile": "aot_eager", "activation_checkpoint": "selective"}),
        full(2, {"tied": False, "compile": "aot_eager", "ep": 2}),
        full(2, {"tied": False, "compile": "aot_eager", "tp": 2}),
    ],
    ids=str,
)  # fmt: skip
def test_the_gradient_is_the_same_on_every_layout(run_on, world_size: int, layout: dict[str, Any]) -> None:
    micro_batches = 1 if world_size == 4 else 2
    same = {key: value for key, value in layout.items() if key in ("tied", "z_loss")}
    actual = run_on(world_size, on_rank, world_size, micro_batches, {**FAMILY, **layout})[0]
    assert not differences(actual, gradients(1, 0, 1, **FAMILY, **same))


def losses_of_two_steps(validates: bool, layout: dict[str, Any]) -> list[float]:
    """This rank's losses of two steps of gradient descent, perhaps with a validation between them."""
    model = build(2, torch.distributed.get_rank(), **layout)
    batch, losses = uneven_sequences(), list[float]()
    for _ in range(2):
        losses += [model.forward_backward([batch], torch.tensor(batch.num_targets)).item()]
        losses += [value.item() for value in model.auxiliary_losses.values()]
        if validates:
            model.loss_sum(batch)
        with torch.no_grad():
            for p in model.net.parameters():
                p -= p.grad
                p.grad = None
    return losses


@pytest.mark.full
@pytest.mark.parametrize("layout", [{"ep": 2}, {"tied": False}], ids=str)
def test_a_validation_between_steps_changes_nothing(run_on, layout: dict[str, Any]) -> None:
    """A validation does not run the modules, so that it must not gather their weights for the next step."""
    layout = {**FAMILY, **layout}
    plain, validated = (run_on(2, losses_of_two_steps, on, layout)[0] for on in (False, True))
    assert validated == plain
    assert plain[1] != plain[3]


def test_control_another_distance_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, ahead = gradients(1, 0, 1, **FAMILY), Batch.ahead
    monkeypatch.setattr(Batch, "ahead", lambda batch, distance: ahead(batch, distance + 1))
    actual = gradients(1, 0, 1, **FAMILY)
    assert {"mtp_loss", EH_PROJ, "model.embed_tokens.weight"} <= set(differences(actual, whole))
    assert torch.equal(actual["loss"], whole["loss"]), "the reported loss is the main one"
