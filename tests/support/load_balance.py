"""One step of a small mixture of experts on any layout, and the gradient of its balance losses by autograd on
the whole batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tests.support.gradients import SHAPE, build
from titanlite.data.batch import Batch
from titanlite.metrics.experts import load_metrics, load_table
from titanlite.models.base import Decoder
from titanlite.models.decoder import dense_mlp
from titanlite.models.load_balance import CORRECTION_BIAS, LoadBalance
from titanlite.models.moe import MoE, MoEConfig, MoEDecoder, MoEFamily, Router
from titanlite.models.qwen3 import TP_PLAN, SelfAttention
from titanlite.models.qwen3_moe import FLAVORS
from titanlite.parallel.initialize import fill_normal
from titanlite.parallel.sharded_model import ShardedModel

NUM_EXPERTS, NUM_CHOSEN, NUM_SEQUENCES, LENGTH = 8, 2, 12, 16
MOE = {"n_experts": NUM_EXPERTS, "n_experts_per_token": NUM_CHOSEN, "moe_hidden_dim": 16}
COEFFICIENT = 3.0  # large, so that the gradient of the losses stands out
BALANCE = {
    "global": LoadBalance(load_balance_coeff=COEFFICIENT),
    "sequence": LoadBalance(load_balance="sequence", load_balance_coeff=COEFFICIENT),
    "sequence_too": LoadBalance(load_balance_coeff=COEFFICIENT, sequence_loss_coeff=COEFFICIENT),
    "z_loss": LoadBalance(load_balance="none", z_loss_coeff=0.1),
    "bias": LoadBalance(load_balance="bias", z_loss_coeff=0.001),
}


def moe_model(world_size: int, rank: int, moe: LoadBalance, **layout: Any) -> ShardedModel:
    """A model whose routers prefer some experts, and whose previous step had uneven loads."""
    layout = {"family": "qwen3_moe", "tied": False, "shape": MOE, "moe": moe, **layout}
    model = build(world_size, rank, **layout)
    for name, p in model.net.named_parameters():
        if name.endswith("gate.weight"):
            fill_normal(p, name, 0.1, 0.5, seed=0)
    for layer in model.net.moe_layers().values():
        layer.gate.load.tokens_per_expert.copy_(torch.arange(NUM_EXPERTS) ** 2)
    return model


def sequences() -> Batch:
    """Twelve sequences of uneven targets."""
    tokens = torch.randint(
        SHAPE["vocab_size"], (NUM_SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(0)
    )
    targets = tokens[:, 1:].clone()
    targets[::3, :5] = -100
    return Batch(tokens[:, :-1], targets, int((targets != -100).sum()), 0)


def micro_batches(batch: Batch, ranks: int, rank: int, num: int) -> list[Batch]:
    """This rank's micro-batches of a batch."""
    size = len(batch.inputs) // ranks // num
    starts = [(i * ranks + rank) * size for i in range(num)]
    return [
        replace(batch, inputs=batch.inputs[a : a + size], targets=batch.targets[a : a + size]) for a in starts
    ]


def gradients_of(model: ShardedModel) -> dict[str, torch.Tensor]:
    named = {name: p.grad for name, p in model.net.named_parameters()}
    return {
        name: grad.full_tensor() if isinstance(grad, DTensor) else grad
        for name, grad in named.items()
        if grad is not None
    }


def step(
    world_size: int, rank: int, num: int, moe: LoadBalance, layout: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Gradients, buffers and metrics after a step of `num` micro-batches on each rank."""
    model, batch = moe_model(world_size, rank, moe, **layout), sequences()
    local = micro_batches(batch, model.mesh.dp_size, model.mesh.dp_rank, num)
    model.forward_backward(local, torch.tensor(batch.num_targets))
    gradients = gradients_of(model)
    model.after_step(torch.tensor(True))
    loads = model.expert_loads
    assert loads is not None
    counts = {name: layer.gate.load.tokens_per_expert for name, layer in model.net.moe_layers().items()}
    return {
        "gradients": gradients,
        "counts": counts,
        "metrics": load_metrics(loads),
        "table": load_table(loads),
    }


def step_on_rank(world_size: int, num: int, moe: LoadBalance, layout: dict[str, Any]) -> dict[str, Any]:
    return step(world_size, torch.distributed.get_rank(), num, moe, layout)


def steps_on_rank(world_size: int, num: int, moe: LoadBalance, layout: dict[str, Any]) -> dict[str, Any]:
    """The correction biases and the metrics after three steps whose weights stay as they are."""
    rank = torch.distributed.get_rank() if world_size > 1 else 0
    model, batch = moe_model(world_size, rank, moe, **layout), sequences()
    local = micro_batches(batch, model.mesh.dp_size, model.mesh.dp_rank, num)
    for _ in range(3):
        model.forward_backward(local, torch.tensor(batch.num_targets))
        model.after_step(torch.tensor(True))
    biases = {name: b for name, b in model.net.named_buffers() if name.endswith(CORRECTION_BIAS)}
    assert model.expert_loads is not None
    return {"biases": biases, "metrics": load_metrics(model.expert_loads)}


def by_autograd(moe: LoadBalance, own_shares: bool = False) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The gradients of one forward of the whole batch, with losses that autograd differentiates, and the
    tokens of each expert. `own_shares`: the loss `global` of three micro-batches, each with its own loads."""
    model, batch = moe_model(1, 0, LoadBalance(load_balance="none")), sequences()
    total, counts = torch.zeros(()), dict[str, torch.Tensor]()
    records: list[tuple[str, torch.Tensor]] = []

    def record(name: str, gate: Router) -> Any:
        def hook(module: Router, args: tuple[torch.Tensor, ...], routing: Any) -> None:
            records.append((name, torch.nn.functional.linear(args[0], gate.weight)))
            counts[name] = counts.get(name, 0) + routing.counts_E

        return hook

    for name, layer in model.net.moe_layers().items():
        layer.gate.register_forward_hook(record(name, layer.gate))
    num = 3 if own_shares else 1
    for micro in micro_batches(batch, 1, 0, num):
        total = total + model.net(*model.model_inputs(micro)) / batch.num_targets
    layers = model.net.moe_layers()
    for name, logits_NE in records:
        p_NE = logits_NE.softmax(-1)
        chosen_NE = torch.zeros_like(p_NE).scatter(1, p_NE.topk(NUM_CHOSEN).indices, 1.0)
        if moe.load_balance == "global":
            tokens_E = layers[name].gate.load.tokens_per_expert
            shares_E = chosen_NE.mean(0) / NUM_CHOSEN if own_shares else tokens_E / tokens_E.sum()
            total = total + COEFFICIENT * NUM_EXPERTS * (shares_E * p_NE.mean(0)).sum() / num
        if moe.sequence_coefficient:
            for f_TE, p_TE in zip(chosen_NE.split(LENGTH), p_NE.split(LENGTH)):
                total = (
                    total
                    + COEFFICIENT
                    * NUM_EXPERTS
                    * (f_TE.mean(0) / NUM_CHOSEN * p_TE.mean(0)).sum()
                    / NUM_SEQUENCES
                )
        if moe.z_loss_coeff:
            total = total + moe.z_loss_coeff * logits_NE.logsumexp(-1).square().mean()
    total.backward()
    return gradients_of(model), counts


def largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of a parameter's gradients."""
    return max(((ours[n] - theirs[n]).norm() / theirs[n].norm().clamp(min=1e-12)).item() for n in ours)


class BiasedRouter(Router):
    """A router with sigmoid scores, whose choice depends on a bias."""

    def __init__(self, config: MoEConfig):
        super().__init__(config)
        self.register_buffer(CORRECTION_BIAS, torch.zeros(config.n_experts))

    def scores(self, logits_NE: torch.Tensor) -> torch.Tensor:
        return logits_NE.sigmoid()

    def probabilities(self, scores_NE: torch.Tensor) -> torch.Tensor:
        return scores_NE / scores_NE.sum(-1, keepdim=True)

    def choose(self, scores_NE: torch.Tensor) -> torch.Tensor:
        return super().choose(scores_NE + self.get_buffer(CORRECTION_BIAS))


def biased_mlp(config: MoEConfig, block: int) -> torch.nn.Module:
    if block < config.n_layers // 2:  # so that the first pipeline stage has no experts
        return dense_mlp(config, block)
    layer = MoE(config)
    layer.gate = BiasedRouter(config)
    return layer


@dataclass(frozen=True, kw_only=True)
class BiasedMoE(MoEFamily, name="biased_moe"):
    """Qwen3's experts behind routers with a correction bias."""

    flavors = FLAVORS

    def build(self) -> Decoder:
        return MoEDecoder(self.config, SelfAttention, TP_PLAN, biased_mlp)
