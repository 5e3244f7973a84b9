"""Steps of an optimizer on any layout, with gradients that are the same on all layouts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor

from tests.support.checkpoints import state_of
from tests.support.gradients import NUM_SEQUENCES, build, uneven_sequences
from titanlite.checkpoint.state import flattened
from titanlite.data.batch import Batch
from titanlite.mesh import local_shard_and_offsets
from titanlite.optim.base import Optimizer, guarded_step, make_state
from titanlite.parallel.sharded_model import ShardedModel
from titanlite.torch_compat import dtensor_like

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # name: number of ranks, arguments of gradients.build
    "fsdp 2": (2, {}),
    "fsdp 3": (3, {}),  # uneven shards
    "fsdp 4": (4, {}),
    "hsdp 2 x 2": (4, {"dp_replicate": 2}),
    "fsdp 2 x tp 2": (4, {"tp": 2}),
    "tp 2 x pp 2": (4, {"tp": 2, "pp": 2}),
    "cp 2": (2, {"cp": 2}),
    "cp 2 x tp 2": (4, {"cp": 2, "tp": 2}),
    "fsdp 2 x pp 2": (4, {"pp": 2}),
}
LR = 1e-2


def gradient(name: str, step: int, shape: torch.Size) -> torch.Tensor:
    """A gradient with a few large singular values, as a pure function of the arguments."""
    seed = int(hashlib.sha256(f"{name} {step}".encode()).hexdigest()[:8], 16)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(shape, generator=generator) * 1e-3
    if len(shape) < 2:
        return noise
    columns, rows = (torch.randn(size, generator=generator) for size in shape[-2:])
    return noise + 0.05 * torch.outer(columns, rows) / shape[-2]


def set_equal_gradients(model: ShardedModel, step: int) -> None:
    """Give this rank its shards of the gradients of `step`."""
    set_gradients_of(model.net, step)


def set_gradients_of(net: nn.Module, step: int) -> None:
    """Give the parameters of `net` this rank's shards of the gradients of `step`."""
    for name, p in net.named_parameters():
        shard, offsets = local_shard_and_offsets(p)
        whole = gradient(name, step, p.shape)
        local = whole[tuple(slice(o, o + n) for o, n in zip(offsets, shard.shape))].contiguous().to(p.device)
        p.grad = dtensor_like(local, p) if isinstance(p, DTensor) else local


def set_real_gradients(model: ShardedModel, step: int) -> None:
    """Give this rank its shards of the gradients of a loss, the same one in each step."""
    batch, ranks = uneven_sequences(), model.mesh.dp_size
    size = NUM_SEQUENCES // ranks // 2
    starts = [(a * ranks + model.mesh.dp_rank) * size for a in range(2)]
    local = [Batch(batch.inputs[i : i + size], batch.targets[i : i + size], 0, 0) for i in starts]
    model.forward_backward(local, torch.tensor(batch.num_targets))


def train(
    world_size: int,
    layout: dict[str, Any],
    optimizer: Optimizer,
    steps: range,
    load: Path | None = None,
    save: Path | None = None,
    set_gradients: Callable[[ShardedModel, int], None] = set_equal_gradients,
) -> dict[str, torch.Tensor]:
    """Take `steps` on one rank. Returns whole weights and optimizer state of this rank's pipeline stage, by
    name. `load`, `save`: DCP checkpoints to begin with and to write at the end."""
    rank = torch.distributed.get_rank() if world_size > 1 else 0
    model = build(world_size, rank, tied=False, **layout)
    built = optimizer.build(model.net, model.mesh)
    if load is not None:
        make_state(built)
        dcp.load(flattened(state_of(model.net, built).tensors()), checkpoint_id=load)  # type: ignore[arg-type]
    for step in steps:
        set_gradients(model, step)
        optimizer.set_scheduled(built, step + 1)
        guarded_step(built, torch.tensor(True), None)
        built.zero_grad()
        model.weights_changed()
    tensors = flattened(state_of(model.net, built).tensors())
    if save is not None:
        dcp.save(tensors, checkpoint_id=save)  # type: ignore[arg-type]
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
        for name, t in tensors.items()
    }


def merged(results: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The tensors of all ranks; those of several ranks must be equal to the bit."""
    whole: dict[str, torch.Tensor] = {}
    for result in results:
        for name, tensor in result.items():
            assert torch.equal(whole.setdefault(name, tensor), tensor), f"{name} differs between ranks"
    return whole


def assert_equal(
    actual: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], rounded: tuple[str, ...] = ()
) -> None:
    """The same names with the same bits. Names that end with one of `rounded` may differ by rounding."""
    assert actual.keys() == wanted.keys()
    unequal = [name for name, tensor in wanted.items() if not torch.equal(actual[name], tensor)]
    assert not [name for name in unequal if not name.endswith(rounded or ("-",))], unequal
    for name in unequal:
        torch.testing.assert_close(actual[name], wanted[name], rtol=1e-6, atol=0)


def distance_moved(
    actual: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], start: dict[str, torch.Tensor]
) -> float:
    """The distance of the matrices of two models, relative to the distance of `wanted` from `start`."""

    def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
        names = [name for name in b if name.startswith("model.") and name.endswith("_proj.weight")]
        return float(sum(((a[n] - b[n]).double() ** 2).sum() for n in names)) ** 0.5

    return distance(actual, wanted) / distance(wanted, start)
