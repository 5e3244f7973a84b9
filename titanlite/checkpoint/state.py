"""The contents of a checkpoint: all state that cannot be recomputed, under names that do not depend on the
layout.

Tensors are saved by torch DCP, which reshards them; the rest is a few numbers in train.json. The learning
rate and the data order are functions of these numbers and are not stored, so a resume never overwrites a
changed schedule."""

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
Tensors = dict[str, dict[str, torch.Tensor]]  # "model" or "optimizer" -> name -> tensor


@dataclass
class TrainState:
    """The small state after a finished step. `sequences`: number of sequences consumed, which is the loader's
    state. `tokens`: number of target tokens trained on, int64 scalar on the device."""

    step: int
    sequences: int
    tokens: torch.Tensor

    def as_json(self) -> dict[str, int]:
        """The state as plain numbers. Waits for the device."""
        return {"step": self.step, "sequences": self.sequences, "tokens": int(self.tokens)}

    def consumed(self, loader: dict[str, int], tokens: torch.Tensor) -> None:
        """Count a finished step: the loader's state after it, and the number of its target tokens."""
        self.sequences = loader["sequences"]
        self.tokens += tokens

    def restore(self, values: dict[str, Any]) -> None:
        """Set the state from the values of a train.json."""
        self.step, self.sequences = values["step"], values["sequences"]
        self.tokens.fill_(values["tokens"])


def read_train(path: Path) -> dict[str, Any]:
    """Read the train.json of a checkpoint. Raises OSError, or ValueError if it is not as a run writes it."""
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
    """The optimizer's state by `<parameter name>.<key>`, such as `model.norm.weight.exp_avg`."""
    names: dict[torch.Tensor, str] = {p: name for name, p in net.named_parameters()}
    tensors = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            assert isinstance(value, torch.Tensor), (
                f"{key} of the optimizer is not a tensor, so it would not be saved"
            )
            tensors[f"{names[parameter]}.{key}"] = value
    return tensors


def tensors_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """All tensors that a checkpoint holds."""
    return {"model": model_tensors(net), "optimizer": optimizer_tensors(net, optimizer)}


def non_finite(tensors: Tensors) -> list[str]:
    """Names of this rank's weights and optimizer state tensors that hold NaN or infinity. Waits for the
    device, and needs almost no memory.

    Optimizer state with another shape than its parameter is left out: a scalar may be infinite on purpose.
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
    largest = foreach_norm(list(local.values()), math.inf)  # the maximum of NaN and a number is NaN
    finite = torch.stack([norm.float() for norm in largest]).isfinite().tolist()
    return [name for name, ok in zip(local, finite) if not ok]


def listed(names: Sequence[str], shown: int = 3) -> str:
    """The first names, and how many more there are, on one line."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def size_of(tensors: Tensors, ranks: Ranks) -> int:
    """Bytes of the tensors of all ranks together; a tensor that several ranks have counts once.
    Collective."""
    mine = {
        f"{part}.{name}": t.numel() * t.itemsize for part, of in tensors.items() for name, t in of.items()
    }
    sizes = {name: size for of in ranks.gather(mine) for name, size in of.items()}
    return sum(sizes.values())
