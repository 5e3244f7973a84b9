"""What a checkpoint holds: all that cannot be recomputed, under names that do not depend on the layout.

Tensors go through torch DCP, which reshards them; the rest is a few numbers in train.json. The learning rate,
the data order and the schedule are functions of these and are not stored, so a changed one is never
overwritten by a resume.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titanlite.checkpoint.ranks import Ranks
from titanlite.config.json_file import expect, load_object
from titanlite.torch_compat import foreach_norm, plain_tensor

TRAIN = "train.json"
TRAIN_KEYS: dict[str, type] = {
    "step": int, "sequences": int, "tokens": int, "global_batch_size": int, "guard": dict, "healthy": bool,
    "finite": bool, "identity": dict,
}  # fmt: skip
Tensors = dict[str, dict[str, torch.Tensor]]  # part of the state, name, tensor


@dataclass
class TrainState:
    """The small state after a finished step. `sequences`: sequences of the run's order that are trained on,
    the loader's state. `tokens`: targets counted, int64 on the device."""

    step: int
    sequences: int
    tokens: torch.Tensor

    def as_json(self) -> dict[str, int]:
        """Plain numbers; reads the device."""
        return {"step": self.step, "sequences": self.sequences, "tokens": int(self.tokens)}

    def consumed(self, loader: dict[str, int], tokens: torch.Tensor) -> None:
        """A step is done: the loader's state after it, and the step's targets that count."""
        self.sequences = loader["sequences"]
        self.tokens += tokens

    def restore(self, values: dict[str, Any]) -> None:
        """Take the numbers of a train.json."""
        self.step, self.sequences = values["step"], values["sequences"]
        self.tokens.fill_(values["tokens"])


def read_train(path: Path) -> dict[str, Any]:
    """The train.json of a checkpoint. Raises OSError, or ValueError for one that no run has written."""
    train = load_object(path / TRAIN)
    expect(train, **TRAIN_KEYS)
    expect(train["guard"], streak=int, skipped_steps=int)
    for key, value in {**train, **train["guard"]}.items():
        if type(value) is int and not 0 <= value < 1 << 63:
            raise ValueError(f"{key} is {value}")
    return train


def model_tensors(net: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and the persistent buffers by name."""
    tensors = {name: plain_tensor(p.detach()) for name, p in net.named_parameters()}
    for prefix, module in net.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                tensors[f"{prefix}.{name}" if prefix else name] = buffer.detach()
    return tensors


def optimizer_tensors(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's tensors by parameter name: `model.norm.weight.exp_avg`."""
    names: dict[torch.Tensor, str] = {p: name for name, p in net.named_parameters()}
    tensors = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            assert isinstance(value, torch.Tensor), (
                f"{key} of the optimizer is not a tensor: it would not be saved"
            )
            tensors[f"{names[parameter]}.{key}"] = value
    return tensors


def tensors_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """All tensors of a checkpoint."""
    return {"model": model_tensors(net), "optimizer": optimizer_tensors(net, optimizer)}


def non_finite(tensors: Tensors) -> list[str]:
    """Names of this rank's weights and moments that hold NaN or infinity. Waits for the device; needs almost
    no memory.

    Of the optimizer's state only tensors of their parameter's shape count: scalars may be infinite on
    purpose.
    """
    shapes = {name: t.shape for name, t in tensors["model"].items()}
    local: dict[str, torch.Tensor] = {}
    for section, group in tensors.items():
        for name, tensor in group.items():
            parameter = name if section == "model" else name.rpartition(".")[0]
            shard = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if shard.is_floating_point() and shard.numel() and shapes.get(parameter) == tensor.shape:
                local[f"{section}.{name}"] = shard
    if not local:
        return []
    largest = foreach_norm(list(local.values()), math.inf)  # NaN wins over any number
    finite = torch.stack([norm.float() for norm in largest]).isfinite().tolist()
    return [name for name, ok in zip(local, finite) if not ok]


def listed(names: Sequence[str], shown: int = 3) -> str:
    """The first of the names, and how many more there are."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def size_of(tensors: Tensors, ranks: Ranks) -> int:
    """Bytes of what all ranks have together. Collective."""
    mine = {
        f"{part}.{name}": t.numel() * t.itemsize for part, of in tensors.items() for name, t in of.items()
    }
    sizes = {name: size for of in ranks.gather(mine) for name, size in of.items()}
    return sum(sizes.values())


def make_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Have the optimizer allocate its state, by a step that changes no weight: zero gradients at a rate of
    zero."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates):
        group["lr"] = rate
