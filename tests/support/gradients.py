"""The gradient of one step on any layout, for sequences with different numbers of tokens that count."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

import tests.support.auxiliary  # noqa: F401  (registers its family)
import titanlite.job  # noqa: F401  (registers the model families)
from titanlite.attention.base import AttentionBackend, AttentionNeeds
from titanlite.attention.linear import build_attention
from titanlite.data.batch import IGNORE, Batch
from titanlite.losses import ChunkedCrossEntropy, CrossEntropy
from titanlite.mesh import build_mesh
from titanlite.models.base import ModelFamily
from titanlite.models.load_balance import LoadBalance
from titanlite.parallel.activation_checkpoint import ActivationCheckpoint
from titanlite.parallel.apply import parallelize
from titanlite.parallel.clip import grad_norms
from titanlite.parallel.compile import Compile
from titanlite.parallel.float8 import Float8
from titanlite.parallel.initialize import fill_normal
from titanlite.parallel.settings import ParallelSettings
from titanlite.parallel.sharded_model import ShardedModel
from titanlite.parallelism import Parallelism

SHAPE = {
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 8,
    "hidden_dim": 64,
    "vocab_size": 252,
}
NUM_SEQUENCES = 8


def build(
    world_size: int, rank: int, *, dp_replicate: int = 1, tied: bool = True, **options: Any
) -> ShardedModel:
    """A small model on the given layout."""
    torch._dynamo.reset()  # after several models in a process, the compiler would use symbolic sizes
    shape = {**SHAPE, "tie_word_embeddings": tied, "n_layers": options.get("layers", SHAPE["n_layers"])}
    family = ModelFamily.choices[options.get("family", "llama3")]
    with torch.device("meta"):
        net = family(flavor="debug", overrides=shape | options.get("shape", {})).build()
    if "lora" in options:
        options["lora"].apply(net, options.get("pp", 1) > 1)
    reduce = options.get("reduce", "step")
    parallelism = Parallelism(
        data_parallel_replicate_degree=dp_replicate,
        tensor_parallel_degree=options.get("tp", 1),
        context_parallel_degree=options.get("cp", 1),
        pipeline_parallel_degree=options.get("pp", 1),
        expert_parallel_degree=options.get("ep", 1),
        pipeline_parallel_schedule=options.get("schedule", "1F1B"),
        fsdp_reduce=reduce,
    )
    mesh = build_mesh(parallelism, "cpu", rank, world_size)
    needs = AttentionNeeds(
        device=torch.device("cpu"), dtype=torch.float32, seq_len=16, n_heads=4, n_kv_heads=2, head_dim=8,
        context_parallel=mesh.degrees.cp > 1, kinds=tuple(net.config.attention_kinds),
    )  # fmt: skip
    settings = ParallelSettings(
        attention=build_attention(AttentionBackend.choices[options.get("attention", "auto")](), needs),
        float8=Float8(
            enable="float8" in options,
            emulate=True,
            recipe=options.get("float8", "tensorwise"),
            enable_fsdp_float8_all_gather=options.get("gather", True),
        ),
        activation_checkpoint=ActivationCheckpoint(
            mode=options.get("activation_checkpoint", "none"),
            selective_ac_option=options.get("ac_option", "op"),
        ),
        compile=Compile(enable="compile" in options, backend=options.get("compile", "inductor")),
        moe=options.get("moe", LoadBalance()),
        param_dtype=options.get("dtype", torch.float32),
        reduce_dtype=torch.float32,
        parallelism=parallelism,
    )
    z_loss = options.get("z_loss", 0.0)
    loss = CrossEntropy(z_loss_multiplier=z_loss)
    if not options.get("whole_logits"):
        loss = ChunkedCrossEntropy(chunk_tokens=24, z_loss_multiplier=z_loss)
    model = parallelize(net, loss, mesh, settings)
    model.materialize(torch.device("cpu"), seed=0)
    for name, p in model.net.named_parameters():
        if name.endswith("norm.weight"):  # norms start equal, which would hide mistakes
            fill_normal(p, name, model.net.init_normal(name)[0], 0.3, seed=0)
        if name.endswith((".sinks", "smear.scale")):  # small at the start
            fill_normal(p, name, 0.0, 1.0, seed=0)
        if name.endswith((".bias", "_bias", ".lora_B.weight")):  # biases and adapters start as zeros
            fill_normal(p, name, 0.0, 0.3, seed=0)
    return model


def uneven_sequences() -> Batch:
    """Eight sequences. The number of targets that count falls from 14 in the first to 0 in the last."""
    rng = np.random.default_rng(0)
    tokens = torch.from_numpy(rng.integers(0, SHAPE["vocab_size"], (NUM_SEQUENCES, 17)))
    targets = tokens[:, 1:].clone()
    for i in range(NUM_SEQUENCES):
        targets[i, : 2 * i + 2] = IGNORE
    return Batch(tokens[:, :-1], targets, int((targets != IGNORE).sum()), 0)


def gradients(world_size: int, rank: int, micro_batches: int, **layout: Any) -> dict[str, torch.Tensor]:
    """Full gradients, loss, auxiliary losses of the loss, the loss of multi-token prediction, and norm of one
    step over `uneven_sequences`, split over the ranks."""
    model, batch = build(world_size, rank, **layout), uneven_sequences()
    ranks = model.mesh.dp_size
    size = NUM_SEQUENCES // ranks // micro_batches
    starts = [(a * ranks + model.mesh.dp_rank) * size for a in range(micro_batches)]
    local = [Batch(batch.inputs[i : i + size], batch.targets[i : i + size], 0, 0) for i in starts]
    loss = model.forward_backward(local, torch.tensor(batch.num_targets))
    names = ("z_loss", "mtp_loss")
    auxiliary = {name: value for name, value in model.auxiliary_losses.items() if name in names}
    if world_size > 1:
        for value in (loss, *auxiliary.values()):
            torch.distributed.all_reduce(value)
    result = {"loss": loss, **auxiliary, "norm": grad_norms(model.net, model.mesh).total}
    for name, p in model.net.named_parameters():
        if not p.requires_grad:
            assert p.grad is None
            continue
        result[name] = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
    return result


def on_rank(world_size: int, micro_batches: int, layout: dict[str, Any]) -> dict[str, torch.Tensor]:
    return gradients(world_size, torch.distributed.get_rank(), micro_batches, **layout)
